"""Takes batches on in the background of an API process, as long as it serves.

Quick changes of state come at every look. Longer work, checking an input file or writing output, is done a few at a
time under a claim, which is renewed from here for as long as this process lives. Expired files are removed beside all
that: where there are many, claims must not lapse meanwhile.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError
from ulid import ULID

from api.problems import log_crash
from db.session import Database
from jobs import batch_claims, batch_work, openai_files
from jobs.batch_work import Todo
from jobs.errors import QueueFull, Unavailable
from jobs.settings import Settings

MAX_AT_ONCE = 2
RETRY_S = 5.0
"""What cannot be done now is tried again after this long."""
MAX_RETRY_S = 60.0
"""As long at most where the tenant's queue is full, which may take days."""
RECLAIM_S = 600.0
"""How often expired files are removed."""

T = TypeVar("T")

log = structlog.get_logger()


class _StoppingError(Exception):
    """Raised inside the work, at its next progress report."""


class BatchSweeper:
    """Belongs to one event loop."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._owner = str(ULID())
        self._wake = asyncio.Event()
        self._stop = threading.Event()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._limiter = anyio.CapacityLimiter(MAX_AT_ONCE)
        self._looker = anyio.CapacityLimiter(1)
        self._reclaimer = anyio.CapacityLimiter(1)
        self._reclaiming: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self._renew_at = self._reclaim_at = 0.0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Something changed that it may go on with."""
        self._wake.set()

    def begin_stop(self) -> None:
        """Give up what is being done at its next progress report; another process, or the next one, does it again."""
        self._stop.set()
        self._wake.set()

    async def close(self) -> None:
        self.begin_stop()
        if self._task is not None:
            await self._task
        running = [*self._working.values(), *filter(None, [self._reclaiming])]
        if running:
            await asyncio.wait(running)

    async def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                await self._look()
                self._failing = False
            except SQLAlchemyError as error:
                if not self._failing:  # a line when it begins; api/outage.py says the rest
                    log.warning("batches_not_looked_at", error=type(error).__name__)
                self._failing = True
            except Exception as error:  # the next look must come, whatever this one met
                log_crash("sweep", "batches", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.batches.poll_s)

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._reclaim_at and self._reclaiming is None:
            self._reclaim_at = now + RECLAIM_S
            self._reclaiming = asyncio.create_task(self._reclaim())
        if self._working and now >= self._renew_at:
            self._renew_at = now + self._settings.batches.claim_s / 3
            claim_s = self._settings.batches.claim_s
            await self._in_thread(batch_claims.renew, self._database, list(self._working), self._owner, claim_s)
        for todo in await self._in_thread(batch_work.look, self._database, self._settings):
            if len(self._working) >= MAX_AT_ONCE or self._stop.is_set():
                break
            if todo.batch_id not in self._working:
                await self._begin(todo)

    async def _begin(self, todo: Todo) -> None:
        claim_s = self._settings.batches.claim_s
        if await self._in_thread(batch_claims.claim, self._database, todo.batch_id, self._owner, claim_s):
            task = self._working[todo.batch_id] = asyncio.create_task(self._work(todo))
            task.add_done_callback(partial(self._done, todo.batch_id))

    async def _work(self, todo: Todo) -> None:
        work = partial(todo.do, self._database, self._settings, todo.batch_id, self._progress)
        after_s = 0.0
        try:
            await anyio.to_thread.run_sync(work, limiter=self._limiter)
        except _StoppingError:
            pass
        except QueueFull as error:
            # A tenth of what it waited already: it was not the queue of a moment.
            after_s = min(max(RETRY_S, todo.age_s / 10), MAX_RETRY_S)
            log.warning("batch_waits", batch=todo.batch_id, reason=str(error))
        except Unavailable as error:
            after_s = RETRY_S
            log.warning("batch_waits", batch=todo.batch_id, reason=str(error))
        except SQLAlchemyError as error:
            after_s = RETRY_S
            log.warning("batch_waits", batch=todo.batch_id, reason=type(error).__name__)
        except Exception as error:
            after_s = RETRY_S
            log_crash("batch", todo.batch_id, error)
        with suppress(SQLAlchemyError):  # else it lapses
            await self._in_thread(batch_claims.release, self._database, todo.batch_id, self._owner, after_s)

    def _done(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._working.pop(batch_id, None)
        self._wake.set()

    async def _reclaim(self) -> None:
        def until_stopped() -> None:
            for _ in openai_files.reclaim(self._database, self._settings):
                if self._stop.is_set():
                    return

        try:
            await anyio.to_thread.run_sync(until_stopped, limiter=self._reclaimer)
        except SQLAlchemyError as error:
            log.warning("files_not_reclaimed", error=type(error).__name__)
        except Exception as error:  # the next one comes, whatever this one met
            log_crash("sweep", "files", error)
        finally:
            self._reclaiming = None

    def _progress(self, _phase: str, _done: int, _total: int) -> None:
        if self._stop.is_set():
            raise _StoppingError

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await anyio.to_thread.run_sync(partial(function, *args), limiter=self._looker)
