"""Rows that take the engine down, and engines that fail by themselves: only the guilty rows end, and no job does."""

from collections.abc import Callable
from typing import Any

from scripted import OWNER, DiesWithAll, Loops, ScriptedBackend, answer, answers_of, job_of, make_loop, rows_of, submit

from db.session import Database
from jobs import leases
from jobs.settings import Settings


class DiesOf(ScriptedBackend):
    """Dies as soon as a row of `guilty` is in it; answers the others at once."""

    def __init__(self, *guilty: int) -> None:
        super().__init__(answer)
        self._guilty = guilty

    def submit(self, samples: Any, done: Any) -> None:
        samples = list(samples)
        if any(sample.token_ids[0] in self._guilty for sample in samples):
            self.die("illegal memory access")
        super().submit(samples, done)


def lives_until_the_end(
    database: Database, settings: Settings, jobs: list[str], make: Callable[[], ScriptedBackend]
) -> int:
    """Start worker after worker until the jobs have ended; returns how many it took."""
    for life in range(1, 30):
        Loops(make_loop(database, settings, make()), 4).join()
        if all(job_of(database, job).state == "completed" for job in jobs):
            return life
        leases.release_all(database, OWNER, crashed=True)
    raise AssertionError("the jobs never end")


def test_two_poison_rows_of_one_shard_are_both_found(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 4)
    lives = lives_until_the_end(database, settings, [job], lambda: DiesOf(1, 2))
    assert lives == 10  # three deaths together, three for each row, and the one that gives the second up
    assert {row: code for row, (_, code) in rows_of(database, job).items()} == {
        0: None,
        1: "poison",
        2: "poison",
        3: None,
    }
    assert answers_of(database, job) == {0: ["answer 0"], 3: ["answer 3"]}


def test_a_poison_row_of_one_tenant_costs_another_no_row(database: Database, settings: Settings) -> None:
    """Their shards are in the engine together when it dies, so both become suspect."""
    theirs = submit(database, settings, [f"row {number}" for number in range(8)], tenant="red")
    ours = submit(database, settings, [f"row {number}" for number in range(10, 18)], tenant="blue")

    deaths_together = [True] * 3

    def make() -> ScriptedBackend:
        if deaths_together:
            deaths_together.pop()
            return DiesWithAll(16)
        return DiesOf(3)

    lives_until_the_end(database, settings, [theirs, ours], make)
    assert {row for row, (_, code) in rows_of(database, theirs).items() if code == "poison"} == {3}
    assert sorted(answers_of(database, theirs)) == [0, 1, 2, 4, 5, 6, 7]
    assert sorted(answers_of(database, ours)) == list(range(8))


def test_an_engine_that_runs_out_of_memory_once_costs_no_row(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 8)
    engines = iter([DiesWithAll(8), ScriptedBackend(answer)])
    assert lives_until_the_end(database, settings, [job], lambda: next(engines)) == 2
    assert answers_of(database, job) == {row: [f"answer {row}"] for row in range(8)}


def test_an_engine_that_fails_whatever_it_is_given_fails_rows_and_ends_no_job_early(
    database: Database, settings: Settings
) -> None:
    """A broken machine: every row is asked `max_attempts` times alone, and none is lost."""
    job = submit(database, settings, 2)
    lives_until_the_end(database, settings, [job], lambda: DiesOf(0, 1))
    assert rows_of(database, job) == {0: ("failed", "poison"), 1: ("failed", "poison")}
    assert job_of(database, job).state == "completed"
