"""The shard loop when a row, the engine or the database fails it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted import (
    OWNER,
    DiesWithAll,
    Loops,
    NumberEncoder,
    ScriptedBackend,
    answer,
    answers_of,
    job_of,
    make_loop,
    rows_of,
    shards_of,
    submit,
    with_queue,
)
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from db.session import Database
from jobs import leases
from jobs.settings import Settings
from worker.backend import Finished, Refused, Sample

NEVER_S = 1000.0


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_an_unexpected_error_gives_the_shard_back_with_one_more_attempt(
    database: Database, settings: Settings, kind: type[BaseException]
) -> None:
    """BaseException is what a panic in a tokenizer's Rust code arrives as."""
    job = submit(database, settings, 4)
    broken = iter([kind("a bug")])
    backend = ScriptedBackend(answer)
    loop = make_loop(database, settings, backend, NumberEncoder(lambda text: next(broken, None)))
    loop.run_available()
    assert shards_of(database, job)[0].attempts == 1
    assert job_of(database, job).state == "completed"
    assert len(answers_of(database, job)) == 4


def test_a_row_that_always_breaks_its_shard_ends_as_poison(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 4)
    encoder = NumberEncoder(lambda text: RuntimeError("a bug") if text == "row 2" else None)
    make_loop(database, settings, ScriptedBackend(answer), encoder).run_available()
    assert rows_of(database, job) == {
        0: ("completed", None), 1: ("completed", None), 2: ("failed", "poison"), 3: ("completed", None)
    }  # fmt: skip
    assert job_of(database, job).state == "completed"


class DiesOf(ScriptedBackend):
    """An engine that dies as soon as `guilty` is in it; all other rows take until `let_go`, or are answered at once."""

    def __init__(self, guilty: int, script: Callable[[Sample], Finished | Refused | None] = answer) -> None:
        super().__init__(script)
        self._guilty = guilty

    def submit(self, samples: Any, done: Any) -> None:
        samples = list(samples)
        if any(sample.token_ids == [self._guilty] for sample in samples):
            self.die("illegal memory access")
        super().submit(samples, done)


def lives_until_the_end(database: Database, settings: Settings, job: str, make: Callable[[], ScriptedBackend]) -> int:
    """Start worker after worker until the job has ended; returns how many it took."""
    for life in range(1, 20):
        Loops(make_loop(database, settings, make()), 3).join()
        if job_of(database, job).state == "completed":
            return life
        leases.release_all(database, OWNER, crashed=True)
    raise AssertionError("the job never ends")


def test_a_row_that_kills_its_worker_is_found_and_its_neighbours_are_answered(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, 4)
    lives = lives_until_the_end(database, settings, job, lambda: DiesOf(2))
    assert lives == 7  # three deaths together, three alone, and the one that gives it up
    assert rows_of(database, job)[2] == ("failed", "poison")
    assert answers_of(database, job) == {row: [f"answer {row}"] for row in (0, 1, 3)}


def test_rows_of_other_shards_are_not_blamed_for_a_death_beside_them(database: Database, settings: Settings) -> None:
    """Every shard in flight becomes suspect with the guilty one, and its rows are slower than the death."""
    job = submit(database, settings, 12)

    class SlowBeside(DiesOf):
        """Answers a row only when it has the engine to itself: beside others it is slower than the next death."""

        def submit(self, samples: Any, done: Any) -> None:
            super().submit(samples, done)
            if len(self.rows) == 1 and not self.failure:
                self.finish(*self.rows)

    first = [True] * 3

    def make() -> ScriptedBackend:
        if first:  # until the shards are suspect: all twelve are in the engine when it dies
            first.pop()
            return DiesWithAll(12)
        return SlowBeside(5, lambda sample: None)

    lives_until_the_end(database, settings, job, make)
    poisoned = [row for row, (_, code) in rows_of(database, job).items() if code == "poison"]
    assert poisoned == [5]
    assert set(answers_of(database, job)) == set(range(12)) - {5}


class FlakyDatabase(Database):
    """Fails the next `num_refused` write transactions before they begin, and the next `num_lost` after their commit,
    as when the connection breaks before the server's answer arrives."""

    num_refused = 0
    num_lost = 0

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.num_refused:
            self.num_refused -= 1
            raise OperationalError("UPDATE", {}, Exception("server closed the connection"))
        with super().write() as connection:
            yield connection
        if self.num_lost:
            self.num_lost -= 1
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"))


@pytest.mark.parametrize(("num_refused", "num_lost"), [(3, 0), (0, 1)], ids=["refused", "answer lost"])
def test_a_database_that_is_away_for_a_while_is_waited_for_and_nothing_is_doubled(
    sqlite_url: str, settings: Settings, num_refused: int, num_lost: int
) -> None:
    database = FlakyDatabase(sqlite_url)
    settings = with_queue(settings, flush_s=NEVER_S)
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend))
    backend.wait_for_rows(0, 1, 2, 3)
    database.num_refused, database.num_lost = num_refused, num_lost
    backend.finish(0, 1, 2, 3)
    loops.join()
    assert answers_of(database, job) == {row: [f"answer {row}"] for row in range(4)}
    assert job_of(database, job).state == "completed"
    assert shards_of(database, job)[0].num_completed == 4
    assert len(backend.seen) == 4
    database.dispose()


def test_a_database_that_stays_away_does_not_keep_a_stopping_worker(sqlite_url: str, settings: Settings) -> None:
    database = FlakyDatabase(sqlite_url)
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    database.num_refused = 1_000_000
    backend.finish(0)
    loop.control.stop(drain_s=0)
    loops.join()
    assert len(backend.aborted) == 3
    database.num_refused = 0
    assert shards_of(database, job)[0].state == "leased"  # it expires, and another worker takes it
    database.dispose()
