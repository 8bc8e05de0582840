"""The two ways to wait, on fakes: long polls share one look per job, long work ends when nobody waits for it."""

import asyncio
import threading
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from api.longwork import LongWork, Progress
from api.watch import StatusWatch
from jobs.errors import NotFound, Unavailable

QUICK_S = 0.01


class Board:
    """A status that counts how often it is read, and changes at a given look."""

    def __init__(self, changes_at: int | None = None) -> None:
        self.num_looks = 0
        self._changes_at = changes_at

    def read(self, job_id: str) -> dict[str, Any]:
        self.num_looks += 1
        return {"state": "new" if self._changes_at is not None and self.num_looks >= self._changes_at else "old"}


class Client:
    """Stands for a request whose client leaves at the n-th question."""

    def __init__(self, leaves_at: int | None = None) -> None:
        self.num_asked = 0
        self._leaves_at = leaves_at

    async def is_disconnected(self) -> bool:
        self.num_asked += 1
        return self._leaves_at is not None and self.num_asked >= self._leaves_at


def is_new(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "new")


def test_a_waiter_is_answered_when_the_status_changes() -> None:
    board = Board(changes_at=4)

    async def wait() -> Any:
        return await StatusWatch(board.read, QUICK_S).status_when("job", is_new, 60, Client().is_disconnected)

    assert asyncio.run(wait()) == {"state": "new"}
    assert board.num_looks == 4


def test_a_thousand_waiters_cost_the_looks_of_one() -> None:
    board = Board(changes_at=1010)

    async def wait() -> list[Any]:
        watch = StatusWatch(board.read, QUICK_S)
        waits = [watch.status_when("job", is_new, 60, Client().is_disconnected) for _ in range(1000)]
        return await asyncio.gather(*waits)

    assert all(is_new(status) for status in asyncio.run(wait()))
    assert board.num_looks <= 1020  # one each to begin with, then about ten together


def test_a_wait_ends_with_the_status_as_it_is() -> None:
    async def wait() -> Any:
        return await StatusWatch(Board().read, 60).status_when("job", is_new, 0.05, Client().is_disconnected)

    assert asyncio.run(wait()) == {"state": "old"}


def test_shutdown_ends_every_wait_at_once() -> None:
    async def wait() -> Any:
        watch = StatusWatch(Board().read, 60)
        waits = [asyncio.ensure_future(watch.status_when("job", is_new, 60, Client().is_disconnected)) for _ in "abc"]
        await asyncio.wait(waits, timeout=0.05)
        watch.closing.set()
        return await asyncio.wait_for(asyncio.gather(*waits), 5)

    assert asyncio.run(wait()) == [{"state": "old"}] * 3


def test_nobody_looks_for_a_client_that_has_left() -> None:
    board = Board()

    async def wait() -> Any:
        return await StatusWatch(board.read, QUICK_S).status_when("job", is_new, 60, Client(3).is_disconnected)

    assert asyncio.run(wait()) == {"state": "old"}
    assert board.num_looks == 3


def test_an_error_while_waiting_reaches_every_waiter() -> None:
    looks = iter([{"state": "old"}, {"state": "old"}])

    def read(job_id: str) -> dict[str, Any]:
        try:
            return next(looks)
        except StopIteration:
            raise NotFound("gone") from None

    async def wait() -> list[Any]:
        watch = StatusWatch(read, QUICK_S)
        waits = [watch.status_when("job", is_new, 60, Client().is_disconnected) for _ in range(2)]
        return await asyncio.gather(*waits, return_exceptions=True)

    assert [type(result) for result in asyncio.run(wait())] == [NotFound, NotFound]


def endless(cleaned: threading.Event) -> Any:
    def work(progress: Progress) -> None:
        try:
            while True:
                progress("working", 0, 0)
        finally:
            cleaned.set()

    return work


def test_long_work_stops_and_cleans_up_when_its_client_leaves() -> None:
    cleaned = threading.Event()

    async def run() -> None:
        await LongWork(asyncio.Event()).run(Client(1), endless(cleaned))  # type: ignore[arg-type]

    with pytest.raises(ClientDisconnect):
        asyncio.run(run())
    assert cleaned.is_set()


def test_long_work_stops_at_shutdown_and_says_that_nothing_was_kept() -> None:
    cleaned = threading.Event()

    async def run() -> None:
        closing = asyncio.Event()
        closing.set()
        await LongWork(closing).run(Client(), endless(cleaned))  # type: ignore[arg-type]

    with pytest.raises(Unavailable, match="nothing of this request was kept"):
        asyncio.run(run())
    assert cleaned.is_set()


def test_a_cancelled_request_waits_for_its_thread_to_clean_up() -> None:
    cleaned = threading.Event()

    async def run() -> None:
        task = asyncio.ensure_future(LongWork(asyncio.Event()).run(Client(), endless(cleaned)))  # type: ignore[arg-type]
        await asyncio.wait({task}, timeout=0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned.is_set()

    asyncio.run(run())


def test_the_works_own_error_comes_through() -> None:
    def work(progress: Progress) -> None:
        raise NotFound("no such job")

    async def run() -> None:
        await LongWork(asyncio.Event()).run(Client(), work)  # type: ignore[arg-type]

    with pytest.raises(NotFound):
        asyncio.run(run())
