"""What an API process does in the background: every tenant's batches get their turn, whatever stands still beside."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batch_desk import Desk
from openai_support import CHAT, many

from api import batch_sweeper
from api.batch_sweeper import BatchSweeper
from db.session import Database
from jobs import batch_claims, batches, openai_files
from jobs.batch_work import Todo
from jobs.errors import QueueFull, Unavailable
from jobs.settings import Settings


def create(desk: Desk, tenant: str, num_rows: int) -> str:
    new = batches.NewBatch(desk.upload(many(num_rows), tenant=tenant), CHAT, "24h")
    return str(batches.create(desk.database, desk.settings, new, tenant, None)["id"])


def sweep(desk: Desk, until: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async def run() -> None:
        sweeper = BatchSweeper(desk.database, desk.settings)
        sweeper.start()
        try:
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(until):
                    await asyncio.sleep(0.02)
        finally:
            await sweeper.close()

    asyncio.run(run())


def test_a_tenant_whose_queue_is_full_does_not_hold_up_the_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sweeper, "RETRY_S", 0.0)
    limits = desk.settings.limits.model_copy(update={"max_queued_jobs": 1})
    desk.settings = desk.settings.model_copy(update={"limits": limits})
    create(desk, "busy", 1)
    desk.step()
    waiting = [create(desk, "busy", num_rows) for num_rows in range(2, 6)]
    others = create(desk, "calm", 1)
    sweep(desk, lambda: desk.state(others) == "in_progress")
    assert {desk.state(batch_id) for batch_id in waiting} == {"validating"}


def test_batches_go_on_while_expired_files_are_removed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    made: list[str] = []

    def long(*_: Any) -> Iterator[Any]:
        made.append(create(desk, "default", 2))
        may_go_on.wait(30)
        yield from ()

    monkeypatch.setattr(openai_files, "reclaim", long)

    def is_taken_on() -> bool:
        return bool(made) and desk.state(made[0]) == "in_progress"

    try:
        sweep(desk, lambda: is_taken_on() and (may_go_on.set() or True))
    finally:
        may_go_on.set()


@pytest.mark.parametrize(
    ("error", "age_s", "after_s"),
    [
        (QueueFull("full"), 1.0, 5.0),
        (QueueFull("full"), 300.0, 30.0),
        (QueueFull("full"), 1e6, 60.0),
        (Unavailable("no space"), 1e6, 5.0),
    ],
)
def test_the_longer_a_queue_is_full_the_less_often_it_is_looked_at(
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    age_s: float,
    after_s: float,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    released: list[float] = []
    monkeypatch.setattr(batch_claims, "release", lambda *args: released.append(args[3]))

    async def work() -> None:
        await BatchSweeper(database, settings)._work(Todo("batch_x", fail, age_s))

    asyncio.run(work())
    assert released == [after_s]
