"""Work that nobody waits for any more."""

import asyncio
import gc
import threading
from typing import Any

from starlette.requests import Request

from api.longwork import LongWork, Progress
from jobs.errors import BadInput

CANARY = "a row of somebody's file"


def test_what_goes_wrong_after_the_request_was_cancelled_is_nowhere_logged() -> None:
    """asyncio logs the text of an exception that nobody looked at; this one quotes a file."""
    begun, go_on = threading.Event(), threading.Event()

    def work(_progress: Progress) -> None:
        begun.set()
        go_on.wait()
        raise BadInput(CANARY)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def cancelled_half_way() -> list[Any]:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        request = Request({"type": "http"}, receive)
        running = asyncio.ensure_future(LongWork(asyncio.Event()).run(request, work))
        await asyncio.to_thread(begun.wait)
        running.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        await asyncio.wait({running})
        assert running.cancelled()
        del running
        gc.collect()
        return told

    assert asyncio.run(cancelled_half_way()) == []
