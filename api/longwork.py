"""Submits and exports: work of seconds to minutes, in few threads, given up when nobody waits for it any more."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from jobs.errors import Unavailable

MAX_AT_ONCE = 4
"""Of the 40 threads that serve requests: status polls must never queue behind uploads."""
LOOK_S = 0.5

T = TypeVar("T")
Progress = Callable[[str, int, int], None]


class _GivenUpError(Exception):
    """Raised inside the work, at its next progress report, so that it cleans up after itself."""


class LongWork:
    """Runs such work in threads. Belongs to one event loop."""

    def __init__(self, closing: asyncio.Event) -> None:
        self._closing = closing
        self._limiter = anyio.CapacityLimiter(MAX_AT_ONCE)

    async def run(self, request: Request, work: Callable[[Progress], T]) -> T:
        """Call `work` with a progress callback that ends it when the client is gone or the service stops.

        Raises:
            ClientDisconnect: the client went away; the work was rolled back by its own clean-up.
            Unavailable: the service stops; likewise.
        """
        stop = threading.Event()

        def progress(_phase: str, _done: int, _total: int) -> None:
            if stop.is_set():
                raise _GivenUpError

        task = asyncio.ensure_future(anyio.to_thread.run_sync(work, progress, limiter=self._limiter))
        try:
            while True:
                await asyncio.wait({task}, timeout=LOOK_S)
                if task.done():
                    return task.result()
                if self._closing.is_set() or await request.is_disconnected():
                    stop.set()
        except _GivenUpError:
            if await request.is_disconnected():
                raise ClientDisconnect from None
            raise Unavailable("the service is stopping: nothing of this request was kept, try again later") from None
        finally:
            # Cancelled by the server's own deadline: the files the thread works on must outlive it.
            stop.set()
            if not task.done():
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # looked at, or asyncio would log its text, which may quote the file
