"""Long polls: waiting for a job's status to change without a thread, a connection or a query per waiter."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool

POLL_S = 0.5
"""How often a watched job is looked at: the delay of a wake-up, and the cost, one query per job and interval."""

Status = dict[str, Any]


class StatusWatch:
    """Looks at each watched job every `poll_s`, once for all who wait for it. Belongs to one event loop."""

    def __init__(self, read: Callable[[str], Status], poll_s: float = POLL_S) -> None:
        self._read = read
        self._poll_s = poll_s
        self._ticks: dict[str, asyncio.Task[Status]] = {}
        self.closing = asyncio.Event()
        """Set at shutdown: every waiter then gets the status as it is."""

    async def status_when(
        self, job_id: str, is_news: Callable[[Status], bool], wait_s: float, is_gone: Callable[[], Awaitable[bool]]
    ) -> Status:
        """The job's status as soon as `is_news` says yes, or the last one when the wait is over.

        Raises:
            NotFound: no such job, or not any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        status = await run_in_threadpool(self._read, job_id)
        while not is_news(status) and not self.closing.is_set() and not await is_gone():
            left_s = deadline - loop.time()
            if left_s <= 0:
                break
            tick = self._tick(job_id)
            await asyncio.wait({tick}, timeout=left_s)
            if tick.done():
                status = tick.result()
        return status

    def _tick(self, job_id: str) -> asyncio.Task[Status]:
        tick = self._ticks.get(job_id)
        if tick is None:
            tick = self._ticks[job_id] = asyncio.create_task(self._look_later(job_id))
            tick.add_done_callback(lambda done: self._forget(job_id, done))
        return tick

    async def _look_later(self, job_id: str) -> Status:
        # Not sleep(): at shutdown the look comes at once, so that waiters leave with an answer.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.closing.wait(), self._poll_s)
        return await run_in_threadpool(self._read, job_id)

    def _forget(self, job_id: str, tick: asyncio.Task[Status]) -> None:
        self._ticks.pop(job_id, None)
        if not tick.cancelled():
            tick.exception()  # every waiter may have gone: then nobody else asks for it
