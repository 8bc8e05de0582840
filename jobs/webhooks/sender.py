"""The sender: takes what is due from the outbox and posts it, a bounded number of attempts at once.

It waits in turns that end when an attempt ends, when `webhooks.poll_s` is over, or when it is told to stop. Webhooks
that fail have at most half of the places, and one only each, so that those that answer are never kept waiting by those
that do not.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db.session import Database
from jobs.settings import Settings
from jobs.webhooks import deliveries, posting
from jobs.webhooks.deliveries import PER_WEBHOOK, Claim, Due, Outcome

GRACE_S = 3.0
"""At shutdown, attempts under way may go on for this long; the others come due again by themselves."""
GIVE_UP_EVERY_S = 60.0

log = structlog.get_logger()


class Sender:
    """Sends a database's webhooks. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        resolve: posting.Resolve | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`now` signs, `clock` times what is done now and then, `chance` spreads the delays."""
        self._database = database
        self._settings = settings
        self._resolve = resolve
        self._now = now
        self._clock = clock
        self._chance = chance
        self._client = posting.make_client()
        self._under_way: dict[asyncio.Task[None], Due] = {}
        self._gave_up_at = -GIVE_UP_EVERY_S
        self._is_away = False

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop` is set, whatever happens to database and receivers meanwhile."""
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                await self._turn()
                await asyncio.wait(
                    {stopped, *self._under_way},
                    timeout=self._settings.webhooks.poll_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            stopped.cancel()
            await self.close()

    async def once(self) -> int:
        """Send what is due now, wait for the outcomes, and return how many attempts that were."""
        num = await self._start_due()
        await asyncio.gather(*list(self._under_way))
        return num

    async def close(self) -> None:
        if self._under_way:
            _, late = await asyncio.wait(list(self._under_way), timeout=GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._client.aclose()

    async def _turn(self) -> None:
        try:
            if self._clock() - self._gave_up_at >= GIVE_UP_EVERY_S:
                self._gave_up_at = self._clock()
                max_age_s = self._settings.webhooks.max_age_s
                num = await asyncio.to_thread(deliveries.give_up_old, self._database, max_age_s)
                if num:
                    log.warning("webhook_events_given_up", num=num, after_s=max_age_s)
            await self._start_due()
        except SQLAlchemyError as error:
            if not self._is_away:  # one line when it begins, not one per turn
                log.warning("webhook_database_away", reason=type(error).__name__)
            self._is_away = True
        else:
            self._is_away = False

    async def _start_due(self) -> int:
        """Claim what fits into the free places, and begin with it."""
        concurrency = self._settings.webhooks.concurrency
        free = concurrency - len(self._under_way)
        if free <= 0:
            return 0
        mine = Counter(due.webhook_id for due in self._under_way.values())
        num_failing = sum(due.is_failing for due in self._under_way.values())
        busy = [webhook_id for webhook_id, num in mine.items() if num >= PER_WEBHOOK]
        num = 0
        for due in await asyncio.to_thread(deliveries.find_due, self._database, 2 * concurrency, busy=busy):
            most = 1 if due.is_failing else PER_WEBHOOK
            if mine[due.webhook_id] >= most or (due.is_failing and num_failing >= max(1, concurrency // 2)):
                continue
            claim = await asyncio.to_thread(deliveries.claim, self._database, due, deliveries.lease_s(self._settings))
            if claim is None:
                continue
            task = asyncio.create_task(self._deliver(claim))
            self._under_way[task] = due
            task.add_done_callback(lambda done: self._under_way.pop(done, None))
            mine[due.webhook_id] += 1
            num_failing += due.is_failing
            num += 1
            if num == free:
                break
        return num

    async def _deliver(self, claim: Claim) -> None:
        headers = posting.signed_headers(claim.secrets, claim.event_id, claim.payload, self._now())
        try:
            outcome = await posting.post(
                self._client, self._settings.webhooks, claim.url, claim.payload, headers, resolve=self._resolve
            )
        except Exception as error:  # nothing that one receiver brings about may stop the others
            outcome = Outcome(error=f"it could not be sent ({type(error).__name__})")
        self._log(claim, outcome)
        try:
            await asyncio.to_thread(
                deliveries.record,
                self._database,
                claim,
                outcome,
                max_attempts=self._settings.webhooks.max_attempts,
                delay_s=deliveries.delay_s(claim.attempts, self._chance(), outcome.retry_after_s),
                lease_s=deliveries.lease_s(self._settings),
            )
        except SQLAlchemyError as error:  # it comes due again when its claim is over
            log.warning("webhook_outcome_not_written", event_id=claim.event_id, reason=type(error).__name__)

    def _log(self, claim: Claim, outcome: Outcome) -> None:
        write = log.info if outcome.is_delivered else log.warning
        write(
            "webhook_delivered" if outcome.is_delivered else "webhook_attempt_failed",
            webhook=claim.webhook_id, event_id=claim.event_id, type=claim.type, job=claim.job_id,
            attempt=claim.attempts, status=outcome.status, error=outcome.error,
        )  # fmt: skip
