"""The outbox: what is due, who sends it, what came of it. Any number of senders may share it.

A claim counts an attempt and moves `next_attempt_at` behind the time that one attempt may take. So a sender that was
killed needs nobody to clean up after it: its events come due again by themselves, and may then arrive twice.

The webhook's row is always written before its deliveries' rows: no cycle of locks.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, exists, func, literal, literal_column, or_, select, update
from sqlalchemy.orm import aliased

from db.clock import db_now, plain
from db.models import Webhook, WebhookDelivery
from db.session import Database
from db.states import DeliveryState, WebhookState
from jobs.errors import BadInput
from jobs.messages import storable, storable_error
from jobs.settings import Settings
from jobs.webhooks.events import LIVE
from jobs.webhooks.registry import keys_of

PER_WEBHOOK = 2
"""Attempts of one sender at one webhook at once."""
ORDERED_ATTEMPTS = 5
"""An event waits for its job's earlier ones until those were tried so often: about a quarter of an hour."""
FAILING_AFTER = 5
"""So many failed attempts in a row make a webhook `failing`."""
PAUSE_S, MAX_PAUSE_S = 60.0, 900.0
"""A failing webhook is tried again after this long; the pause doubles from the one to the other."""
DELAYS_S = (5.0, 30.0, 120.0, 600.0, 3600.0, 7200.0, 14_400.0, 28_800.0)
"""From one attempt of an event to the next; the last goes on."""
JITTER = 0.2
"""Of a delay, at most, that chance adds: what failed together must not come back together."""
SPARE_S = 20.0
"""A claim outlives its attempt by this much, for the database to take down what came of it."""
MAX_LIST = 1000
GONE = 410

_PENDING: ColumnElement[str] = literal_column(f"'{DeliveryState.PENDING}'")  # written out: see ending._IS_OPEN


@dataclass(frozen=True, slots=True)
class Due:
    """A delivery that nobody is sending, as it was when looked at."""

    id: int
    webhook_id: str
    attempts: int
    is_failing: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A delivery in one sender's hands."""

    id: int
    event_id: str
    webhook_id: str
    job_id: str | None
    type: str
    payload: str
    attempts: int
    """This one counted; the fence."""
    url: str
    secrets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt: a status where the receiver answered, an error unless it took the event."""

    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    """What the receiver asked for; unbounded."""

    @property
    def is_delivered(self) -> bool:
        return self.error is None


def lease_s(settings: Settings) -> float:
    return settings.webhooks.timeout_s + SPARE_S


def delay_s(attempts: int, chance: float, asked_s: float | None = None) -> float:
    """How long after its attempt number `attempts` an event is tried again.

    Args:
        chance: between 0 and 1.
        asked_s: the receiver's own wish; it can delay, up to the longest delay, and not hasten.
    """
    usual = DELAYS_S[min(attempts, len(DELAYS_S)) - 1] * (1 + JITTER * chance)
    return max(usual, min(asked_s or 0.0, DELAYS_S[-1]))


def pause_s(num_failures: int) -> float:
    doublings = min(num_failures - FAILING_AFTER, 30)
    return float(min(PAUSE_S * 2**doublings, MAX_PAUSE_S))


def find_due(database: Database, limit: int, *, busy: Collection[str] = ()) -> list[Due]:
    """What may be sent now, the longest waiting first, a few per webhook, without the webhooks that are `busy`."""
    earlier = aliased(WebhookDelivery)
    waits_for_another = exists().where(
        earlier.webhook_id == WebhookDelivery.webhook_id,
        earlier.job_id == WebhookDelivery.job_id,
        earlier.id < WebhookDelivery.id,
        earlier.state == _PENDING,
        earlier.attempts < ORDERED_ATTEMPTS,
    )
    order = (WebhookDelivery.next_attempt_at, WebhookDelivery.id)
    rank = func.row_number().over(partition_by=WebhookDelivery.webhook_id, order_by=order)
    due = (
        select(WebhookDelivery.id, WebhookDelivery.webhook_id, WebhookDelivery.attempts, Webhook.state,
               WebhookDelivery.next_attempt_at, rank.label("rank"))
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(
            WebhookDelivery.state == _PENDING,
            WebhookDelivery.next_attempt_at <= db_now(),
            Webhook.state.in_(LIVE),
            _may_resume(),
            Webhook.id.not_in(sorted(busy)),
            ~waits_for_another,
        )
        .subquery()
    )  # fmt: skip
    most = case((due.c.state == WebhookState.FAILING, 1), else_=PER_WEBHOOK)
    statement = select(due).where(due.c.rank <= most).order_by(due.c.next_attempt_at, due.c.id).limit(limit)
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return [Due(row.id, row.webhook_id, row.attempts, row.state == WebhookState.FAILING) for row in rows]


def claim(database: Database, due: Due, lease_s: float) -> Claim | None:
    """Take what was found due; None where another sender was faster, or its webhook changed meanwhile."""
    with database.write() as connection:
        if due.is_failing:  # one event at a time, of all senders together
            mine = connection.execute(
                update(Webhook)
                .where(Webhook.id == due.webhook_id, Webhook.state == WebhookState.FAILING, _may_resume())
                .values(resume_at=db_now(literal(lease_s)))
            )
            if mine.rowcount != 1:
                return None
        row = connection.execute(
            update(WebhookDelivery)
            .where(
                WebhookDelivery.id == due.id,
                WebhookDelivery.state == DeliveryState.PENDING,
                WebhookDelivery.attempts == due.attempts,
                WebhookDelivery.next_attempt_at <= db_now(),
            )
            .values(attempts=WebhookDelivery.attempts + 1, next_attempt_at=db_now(literal(lease_s)))
            .returning(WebhookDelivery.event_id, WebhookDelivery.job_id, WebhookDelivery.type, WebhookDelivery.payload,
                       WebhookDelivery.attempts)
        ).one_or_none()  # fmt: skip
        if row is None:
            return None
        is_overlap = func.coalesce(Webhook.old_secret_until > db_now(), False)
        webhook = connection.execute(
            select(Webhook.url, Webhook.secret, Webhook.old_secret, is_overlap.label("is_overlap")).where(
                Webhook.id == due.webhook_id, Webhook.state.in_(LIVE)
            )
        ).one_or_none()
    if webhook is None:  # removed just now, with what it was to be told
        return None
    return Claim(due.id, row.event_id, due.webhook_id, row.job_id, row.type, row.payload, row.attempts, webhook.url,
                 keys_of(webhook))  # fmt: skip


def record(database: Database, claim: Claim, outcome: Outcome, *, max_attempts: int, delay_s: float,
           lease_s: float) -> None:  # fmt: skip
    """Write down what came of an attempt, for the event and for its webhook."""
    with database.write() as connection:
        if outcome.is_delivered:
            _delivered(connection, claim, outcome, lease_s)
        elif outcome.status == GONE:
            _gone(connection, claim)
        else:
            _failed(connection, claim, outcome, max_attempts, delay_s)


def give_up_old(database: Database, max_age_s: float) -> int:
    """End what could not be delivered for too long, tried or not. Returns how many events."""
    is_old = and_(
        WebhookDelivery.state == _PENDING,
        WebhookDelivery.next_attempt_at <= db_now(),
        WebhookDelivery.created_at < db_now(literal(-max_age_s)),
    )
    with database.read() as connection:
        if connection.execute(select(WebhookDelivery.id).where(is_old).limit(1)).first() is None:
            return 0  # no writer's lock for nothing
    with database.write() as connection:
        return connection.execute(
            update(WebhookDelivery)
            .where(is_old)
            .values(
                state=DeliveryState.FAILED,
                last_error=f"not delivered within {max_age_s:.0f} s (webhooks.max_age_s); before: "
                + func.coalesce(WebhookDelivery.last_error, "never tried"),
            )
        ).rowcount


def list_deliveries(
    database: Database,
    *,
    webhook_id: str | None = None,
    tenant: str | None = None,
    state: str | None = None,
    job_id: str | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """The newest first, with their fate and without their payload.

    Raises:
        BadInput: a limit or state that does not exist.
    """
    if not 1 <= limit <= MAX_LIST:
        raise BadInput(f"limit is {limit}: it must be between 1 and {MAX_LIST}")
    if state is not None and state not in list(DeliveryState):
        raise BadInput(f"state is {state!r}: use one of {', '.join(DeliveryState)}")
    columns = (
        WebhookDelivery.event_id, WebhookDelivery.webhook_id, WebhookDelivery.job_id, WebhookDelivery.type,
        WebhookDelivery.state, WebhookDelivery.attempts, WebhookDelivery.last_status, WebhookDelivery.last_error,
        WebhookDelivery.created_at, WebhookDelivery.next_attempt_at, WebhookDelivery.delivered_at,
    )  # fmt: skip
    statement = (
        select(*columns)
        .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
        .where(Webhook.state != WebhookState.REMOVED)
    )
    for column, value in (
        (WebhookDelivery.webhook_id, webhook_id),
        (Webhook.tenant, tenant),
        (WebhookDelivery.state, state),
        (WebhookDelivery.job_id, job_id),
    ):
        if value is not None:
            statement = statement.where(column == storable(value))
    with database.read() as connection:
        rows = connection.execute(statement.order_by(WebhookDelivery.id.desc()).limit(limit)).all()
    return [_described(row) for row in rows]


def _described(row: Any) -> dict[str, Any]:
    said = {name: plain(value) for name, value in row._mapping.items()}
    if row.state != DeliveryState.PENDING:
        said["next_attempt_at"] = None
    return said


def _may_resume() -> Any:
    return or_(Webhook.resume_at.is_(None), Webhook.resume_at <= db_now())


def _delivered(connection: Connection, claim: Claim, outcome: Outcome, lease_s: float) -> None:
    is_back = connection.execute(
        update(Webhook)
        .where(Webhook.id == claim.webhook_id, Webhook.state == WebhookState.FAILING)
        .values(state=WebhookState.ACTIVE, num_failures=0, resume_at=None)
    ).rowcount
    connection.execute(
        update(Webhook).where(Webhook.id == claim.webhook_id, Webhook.num_failures > 0).values(num_failures=0)
    )
    # Without the fence: it has arrived, whoever else is sending it by now.
    connection.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id == claim.id, WebhookDelivery.state == DeliveryState.PENDING)
        .values(
            state=DeliveryState.DELIVERED, delivered_at=db_now(), last_status=outcome.status, last_error=None,
        )
    )  # fmt: skip
    if is_back:
        # It answers again: what waits out a long delay goes now. What is being sent comes due within a lease.
        connection.execute(
            update(WebhookDelivery)
            .where(
                WebhookDelivery.webhook_id == claim.webhook_id,
                WebhookDelivery.state == _PENDING,
                WebhookDelivery.next_attempt_at > db_now(literal(lease_s)),
            )
            .values(next_attempt_at=db_now())
        )


def _gone(connection: Connection, claim: Claim) -> None:
    connection.execute(
        update(Webhook)
        .where(Webhook.id == claim.webhook_id, Webhook.state.in_(LIVE))
        .values(state=WebhookState.GONE, resume_at=None)
    )
    connection.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == claim.webhook_id, WebhookDelivery.state == _PENDING)
        .values(state=DeliveryState.FAILED, last_status=GONE, last_error="its receiver is gone (410)")
    )


def _failed(connection: Connection, claim: Claim, outcome: Outcome, max_attempts: int, delay_s: float) -> None:
    num_failures = connection.execute(
        update(Webhook)
        .where(Webhook.id == claim.webhook_id, Webhook.state.in_(LIVE))
        .values(num_failures=Webhook.num_failures + 1)
        .returning(Webhook.num_failures)
    ).scalar_one_or_none()
    if num_failures is not None and num_failures >= FAILING_AFTER:
        connection.execute(
            update(Webhook)
            .where(Webhook.id == claim.webhook_id)
            .values(state=WebhookState.FAILING, resume_at=db_now(literal(pause_s(num_failures))))
        )
    is_over = claim.attempts >= max_attempts
    connection.execute(
        update(WebhookDelivery)
        .where(
            WebhookDelivery.id == claim.id,
            WebhookDelivery.state == DeliveryState.PENDING,
            WebhookDelivery.attempts == claim.attempts,
        )
        .values(
            state=DeliveryState.FAILED if is_over else DeliveryState.PENDING,
            next_attempt_at=db_now() if is_over else db_now(literal(delay_s)),
            last_status=outcome.status,
            last_error=storable_error(outcome.error or ""),
        )
    )
