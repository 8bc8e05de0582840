"""Many writers at once, on both databases: nothing is lost, nothing runs twice, nothing waits for ever."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from batches import (
    LEASE_S,
    MODEL,
    OWNER,
    acquire,
    answered,
    check_integrity,
    failed,
    job_state,
    num_rows_in_tables,
    requests_of,
    run_shard,
    submit_rows,
    submit_table,
    write_table,
)
from sqlalchemy import select, text, update

from db.models import Job, Shard
from db.session import Database
from jobs import ending, leases, results
from jobs.errors import Conflict, LeaseLost, QueueFull
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file

TIMEOUT_S = 30.0


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Run all at the same moment; each one's result, or the exception it raised.

    In daemon threads: what is stuck in a lock fails its test here, and does not hold up the others.
    """
    barrier = threading.Barrier(len(actions))
    outcomes: list[Any] = [TimeoutError(f"still running after {TIMEOUT_S} s")] * len(actions)

    def start(number: int) -> None:
        barrier.wait(TIMEOUT_S)
        try:
            outcomes[number] = actions[number]()
        except BaseException as error:
            outcomes[number] = error

    started = [threading.Thread(target=start, args=(number,), daemon=True) for number in range(len(actions))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(TIMEOUT_S)
    return outcomes


def beside(action: Callable[[], Any]) -> Any:
    """Run it in another thread, while this one holds what it holds."""
    [outcome] = at_once(action)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def test_eight_workers_lease_every_shard_once(database: Database, settings: Settings) -> None:
    single = settings.model_copy(update={"queue": settings.queue.model_copy(update={"shard_rows": 1})})
    job_id = submit_rows(database, single, 80)

    def work(owner: str) -> list[int]:
        held = []
        while (lease := leases.acquire(database, MODEL, owner, LEASE_S)) is not None:
            held.append(lease.shard_id)
        return held

    taken = at_once(*(lambda owner=str(number) * 26: work(owner) for number in range(8)))
    assert [error for error in taken if isinstance(error, BaseException)] == []
    counted = Counter(shard for shards in taken if isinstance(shards, list) for shard in shards)
    assert len(counted) == 80
    assert set(counted.values()) == {1}
    check_integrity(database, job_id)


def test_eight_workers_finish_a_job_together(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 96)

    def work(owner: str) -> int:
        num_shards = 0
        while (lease := leases.acquire(database, MODEL, owner, LEASE_S)) is not None:
            for row in results.load(database, lease).rows:
                results.write(database, lease, [answered(row)])
            leases.finish(database, lease)
            num_shards += 1
        return num_shards

    done = at_once(*(lambda owner=str(number) * 26: work(owner) for number in range(8)))
    assert [error for error in done if isinstance(error, BaseException)] == []
    assert sum(number for number in done if isinstance(number, int)) == 24
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_a_read_followed_by_a_write_loses_no_update(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 1)

    def count_up() -> None:
        for _ in range(25):
            with database.write() as connection:
                now = connection.execute(select(Shard.attempts).with_for_update()).scalar_one()
                connection.execute(update(Shard).values(attempts=now + 1))

    assert at_once(*[count_up] * 8) == [None] * 8
    with database.read() as connection:
        assert connection.execute(select(Shard.attempts)).scalar_one() == 200


def test_a_reader_is_not_held_up_by_an_open_write(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 1)
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET state = 'failed'"))
        assert beside(lambda: job_state(database, job_id)) == "queued"


@pytest.mark.parametrize("attempt", range(5))
def test_a_job_ends_when_two_workers_finish_its_last_two_shards_at_once(
    database: Database, settings: Settings, attempt: int
) -> None:
    job_id = submit_rows(database, settings, 8)
    held = [acquire(database, "A" * 26), acquire(database, "B" * 26)]
    for lease in held:
        results.write(database, lease, [answered(row) for row in results.load(database, lease).rows])
    assert at_once(*(lambda lease=lease: leases.finish(database, lease) for lease in held)) == [None, None]
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


@pytest.mark.parametrize("attempt", range(5))
def test_cancelling_races_leasing_and_finishing_without_a_deadlock(
    database: Database, settings: Settings, attempt: int
) -> None:
    job_id = submit_rows(database, settings, 32)
    held = acquire(database)

    def work(owner: str) -> None:
        while (lease := leases.acquire(database, MODEL, owner, LEASE_S)) is not None:
            try:
                if results.load(database, lease).job_state == "cancelling":
                    leases.abandon(database, lease)
                else:
                    run_shard(database, lease)
            except LeaseLost:
                pass

    def sweep() -> None:
        for _ in range(3):
            leases.sweep(database)

    outcome = at_once(
        lambda: work("A" * 26),
        lambda: work("B" * 26),
        lambda: run_shard(database, held),
        sweep,
        lambda: ending.cancel(database, job_id),
    )
    leases.sweep(database)
    # The workers may all have been done before the cancel came; it says so then.
    faults = [error for error in outcome if isinstance(error, BaseException)]
    if faults:
        assert [type(fault) for fault in faults] == [Conflict]
        assert job_state(database, job_id) == "completed"
    else:
        assert job_state(database, job_id) == "cancelled"
    check_integrity(database, job_id)


def test_many_workers_abandon_a_cancelled_job_at_once(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 32)
    held = [acquire(database, str(number) * 26) for number in range(6)]
    ending.cancel(database, job_id)
    outcome = at_once(*(lambda lease=lease: leases.abandon(database, lease) for lease in held))
    assert outcome == [None] * 6
    assert job_state(database, job_id) == "cancelled"
    check_integrity(database, job_id)


def test_sweepers_that_run_at_once_reap_each_lease_once(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 40)
    for _ in range(10):
        acquire(database)
    with database.write() as connection:
        connection.execute(text("UPDATE shards SET lease_expires_at = '2001-01-01 00:00:00.000000'"))
    reaped = at_once(*[lambda: leases.sweep(database)] * 4)
    assert sum(number for number in reaped if isinstance(number, int)) == 10
    with database.read() as connection:
        assert set(connection.execute(select(Shard.attempts).where(Shard.job_id == job_id)).scalars()) == {1}


def test_a_sweep_does_not_wait_for_a_worker_that_was_stopped_in_a_transaction(
    database: Database, settings: Settings
) -> None:
    """Its heartbeat would wait with it, and its own leases would expire."""
    if database.is_sqlite:
        pytest.skip("SQLite has one lock for all writers")
    job_id = submit_rows(database, settings, 12)
    stuck, *_ = (acquire(database) for _ in range(3))
    with database.write() as connection:
        connection.execute(text("UPDATE shards SET lease_expires_at = '2001-01-01 00:00:00.000000'"))
    with database.write() as connection:  # as `results.write` locks it
        connection.execute(select(Shard.id).where(Shard.id == stuck.shard_id).with_for_update())
        assert beside(lambda: leases.sweep(database)) == 2
    assert leases.sweep(database) == 1

    with database.write() as connection:
        connection.execute(text("UPDATE shards SET state = 'done'"))
    with database.write() as connection:  # as `settle_job` locks it
        connection.execute(select(Job.id).where(Job.id == job_id).with_for_update())
        beside(lambda: leases.sweep(database))
        assert job_state(database, job_id) == "running"
    leases.sweep(database)
    assert job_state(database, job_id) == "completed"


def test_a_late_write_and_the_reaper_never_both_win(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    rows = results.load(database, lease).rows
    with database.write() as connection:
        connection.execute(text("UPDATE shards SET lease_expires_at = '2001-01-01 00:00:00.000000'"))
    outcome = at_once(
        lambda: results.write(database, lease, [answered(row) for row in rows]), lambda: leases.sweep(database)
    )
    # A sweep passes over what is just being written; the next one finds it.
    assert outcome[1] + (leases.sweep(database) if outcome[1] == 0 else 0) == 1
    num_written = num_rows_in_tables(database)["outputs"]
    assert num_written == (4 if outcome[0] is None else 0)
    again = acquire(database, OWNER)
    assert len(results.load(database, again).rows) == 4 - num_written
    check_integrity(database, job_id)


def test_the_same_content_submitted_at_once_is_one_job(database: Database, settings: Settings) -> None:
    path = write_table(settings.home.parent / "same.parquet", {"prompt": ["a", "b"]})
    options = SubmitOptions(model=MODEL, dedupe=True)
    submitted = at_once(*[lambda: submit_file(database, settings, path, options)] * 4)
    assert [error for error in submitted if isinstance(error, BaseException)] == []
    assert len({job.job_id for job in submitted if not isinstance(job, BaseException)}) == 1
    assert sum(job.is_new for job in submitted if not isinstance(job, BaseException)) == 1
    assert num_rows_in_tables(database)["requests"] == 2


def test_jobs_submitted_at_once_do_not_pass_a_limit_together(database: Database, settings: Settings) -> None:
    limits = settings.limits.model_copy(update={"max_queued_jobs": 2, "max_queued_rows": 5})
    settings = settings.model_copy(update={"limits": limits})
    path = write_table(settings.home.parent / "two.parquet", {"prompt": ["a", "b"]})
    outcomes = at_once(*[lambda: submit_file(database, settings, path, SubmitOptions(model=MODEL))] * 6)
    assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 2
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)] == [QueueFull] * 4
    assert num_rows_in_tables(database)["requests"] == 4


def test_submitting_leaves_workers_free_to_lease(database: Database, settings: Settings) -> None:
    """While the rows are read and checked, which is the slow part, no lock is held."""
    submit_rows(database, settings, 4)
    held: list[leases.Lease] = []

    def report(phase: str, done: int, total: int) -> None:
        if phase == "reading" and not held:
            held.append(beside(lambda: acquire(database)))

    path = write_table(settings.home.parent / "second.parquet", {"prompt": ["a"]})
    submit_file(database, settings, path, SubmitOptions(model=MODEL), report)
    assert len(held) == 1


def test_jobs_submitted_at_once_are_all_there(database: Database, settings: Settings) -> None:
    def submit(number: int) -> str:
        home = settings.home.parent / f"user{number}" / "home"
        home.parent.mkdir()
        own = settings.model_copy(update={"home": home})
        return submit_table(database, own, {"prompt": [f"{number}"] * 9}).job_id

    job_ids = at_once(*(lambda number=number: submit(number) for number in range(6)))
    assert [error for error in job_ids if isinstance(error, BaseException)] == []
    for job_id in job_ids:
        assert len(requests_of(database, str(job_id))) == 9
        check_integrity(database, str(job_id))


def test_a_lease_passes_over_a_shard_that_another_worker_is_just_taking(database: Database, settings: Settings) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite's writers exclude each other: there is nothing to pass over")
    submit_rows(database, settings, 8)
    with database.write() as connection:
        first = connection.execute(select(Shard.id).order_by(Shard.id).limit(1).with_for_update()).scalar_one()
        lease = beside(lambda: acquire(database))
        assert lease.shard_id != first
    assert acquire(database).shard_id == first


def test_a_lease_does_not_wait_for_a_worker_that_was_stopped_while_it_marked_the_job(
    database: Database, settings: Settings
) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite has one lock for all writers")
    job_id = submit_rows(database, settings, 8)
    with database.write() as connection:
        connection.execute(update(Job).where(Job.id == job_id).values(state="running"))
        assert beside(lambda: acquire(database)).job_id == job_id
    assert job_state(database, job_id) == "running"


def test_a_worker_late_to_end_a_job_does_not_end_its_retry(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the shards and its lock on the job, another worker ends the job and a user retries it."""
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    results.write(database, lease, [failed(row) for row in results.load(database, lease).rows])
    look = ending._has_open_shards

    def look_and_fall_asleep(connection: Any, job_id: str) -> bool:
        seen = look(connection, job_id)
        monkeypatch.setattr(ending, "_has_open_shards", look)
        ending.settle_job(database, job_id)
        ending.retry(database, job_id)
        return seen

    monkeypatch.setattr(ending, "_has_open_shards", look_and_fall_asleep)
    leases.finish(database, lease)
    assert job_state(database, job_id) == "queued"
    check_integrity(database, job_id)
    with pytest.raises(Conflict):
        ending.retry(database, job_id)
    run_shard(database, acquire(database))
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)
