"""One log line when the database goes and one when it is back, however many requests meet it meanwhile."""

import asyncio
import time
from contextlib import suppress

import structlog
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from db.session import Database

LOOK_S = 1.0

log = structlog.get_logger()


class DatabaseOutage:
    """Belongs to one event loop. After the first failure it looks by itself until the database answers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._looking: asyncio.Task[None] | None = None

    def note(self, error: BaseException, method: str, path: str) -> None:
        """A request met it."""
        if self._looking is None or self._looking.done():
            log.warning("database_unavailable", method=method, path=path, error=type(error).__name__)
            self._looking = asyncio.create_task(self._look_until_it_is_back())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def _look_until_it_is_back(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(SQLAlchemyError):
                await run_in_threadpool(self._ask)
                log.info("database_back", after_s=round(time.monotonic() - began, 1))
                return

    def _ask(self) -> None:
        with self._database.read() as connection:
            connection.execute(text("SELECT 1"))
