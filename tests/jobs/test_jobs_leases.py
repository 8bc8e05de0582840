"""Who owns which shard, and what a stale owner can no longer do."""

from typing import Any

import pytest
from batches import (
    LEASE_S,
    MODEL,
    acquire,
    answered,
    check_integrity,
    drain,
    expire_lease,
    failed,
    job_state,
    num_rows_in_tables,
    requests_of,
    run_shard,
    shards_of,
    submit_rows,
    submit_table,
)
from sqlalchemy import event, text

from db.session import Database
from jobs import ending, leases, results
from jobs.errors import Conflict, LeaseLost, NotFound
from jobs.settings import Settings

ANNA, BERT = "A" * 26, "B" * 26


def test_a_lease_covers_the_shards_rows_and_starts_the_job(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 6)
    assert job_state(database, job_id) == "queued"
    lease = acquire(database, ANNA)
    assert (lease.job_id, lease.owner, lease.token, lease.attempts) == (job_id, ANNA, 1, 0)
    assert (lease.start_row, lease.end_row) == (0, 4)
    assert job_state(database, job_id) == "running"
    assert [row.row_index for row in results.load(database, lease).rows] == [0, 1, 2, 3]


def test_nothing_is_leased_twice_and_nothing_of_another_model(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 6)
    assert {acquire(database, ANNA).shard_id, acquire(database, BERT).shard_id} == {1, 2}
    assert leases.acquire(database, MODEL, ANNA, LEASE_S) is None
    assert not leases.has_queued(database, MODEL)
    submit_rows(database, settings, 1, model="other")
    assert leases.acquire(database, MODEL, ANNA, LEASE_S) is None
    assert leases.has_queued(database, "other")


def test_a_higher_priority_comes_first_and_equals_in_order_of_submission(
    database: Database, settings: Settings
) -> None:
    first = submit_rows(database, settings, 5)
    second = submit_rows(database, settings, 5)
    urgent = submit_rows(database, settings, 5, priority=1)
    patient = submit_rows(database, settings, 5, priority=-1)
    order = [acquire(database) for _ in range(8)]
    assert [lease.job_id for lease in order] == [urgent] * 2 + [first] * 2 + [second] * 2 + [patient] * 2
    assert [lease.start_row for lease in order] == [0, 4] * 4


def test_whoever_waits_long_enough_comes_before_a_higher_priority(database: Database, settings: Settings) -> None:
    old = submit_rows(database, settings, 1)
    ageing_s = settings.queue.ageing_s_per_priority
    with database.write() as connection:
        connection.execute(text("UPDATE shards SET queue_key = queue_key - :age"), {"age": 2 * ageing_s + 1})
    urgent = submit_rows(database, settings, 1, priority=2)
    more_urgent = submit_rows(database, settings, 1, priority=3)
    assert [acquire(database).job_id for _ in range(3)] == [more_urgent, old, urgent]


def test_a_stream_of_urgent_jobs_does_not_starve_a_patient_one(database: Database, settings: Settings) -> None:
    """A minute passes with each urgent job; a step of priority is worth 4."""
    queue = settings.queue.model_copy(update={"ageing_s_per_priority": 240.0})
    settings = settings.model_copy(update={"queue": queue})
    patient = submit_rows(database, settings, 8)
    leased = []
    for _ in range(7):
        submit_rows(database, settings, 4, priority=1)
        leased.append(acquire(database).job_id)
        with database.write() as connection:
            connection.execute(text("UPDATE shards SET queue_key = queue_key - 60"))
    turns = [turn for turn, job in enumerate(leased) if job == patient]
    assert turns == [4, 5]  # not before the urgent ones, and both shards as soon as it has waited 4 minutes


def test_a_released_shard_keeps_its_place_and_only_its_unfinished_rows_run(
    database: Database, settings: Settings
) -> None:
    job_id = submit_rows(database, settings, 8)
    lease = acquire(database, ANNA)
    results.write(database, lease, [answered(row) for row in results.load(database, lease).rows[:2]])
    assert leases.release(database, lease)
    assert not leases.release(database, lease)
    again = acquire(database, BERT)
    assert (again.shard_id, again.token, again.attempts) == (lease.shard_id, 2, 0)
    assert [row.row_index for row in results.load(database, again).rows] == [2, 3]
    run_shard(database, again)
    drain(database)
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_an_expired_lease_returns_to_the_queue_and_counts_as_a_death(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 4)
    lease = acquire(database, ANNA)
    assert leases.sweep(database) == 0
    expire_lease(database, lease.shard_id)
    assert leases.sweep(database) == 1
    again = acquire(database, BERT)
    assert (again.shard_id, again.token, again.attempts) == (lease.shard_id, 2, 1)


def test_a_heartbeat_prolongs_what_is_held_and_tells_what_is_lost(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 8)
    kept, lost = acquire(database, ANNA), acquire(database, ANNA)
    expire_lease(database, lost.shard_id)
    leases.sweep(database)
    expire_lease(database, kept.shard_id)
    renewal = leases.renew(database, ANNA, LEASE_S)
    assert renewal.held == {(kept.shard_id, kept.token)}
    assert renewal.cancelled_jobs == frozenset()
    assert leases.sweep(database) == 0
    ending.cancel(database, job_id)
    assert leases.renew(database, ANNA, LEASE_S).cancelled_jobs == {job_id}
    assert leases.renew(database, BERT, LEASE_S).held == frozenset()


def test_everything_a_dead_worker_held_comes_back_at_once(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 12)
    acquire(database, ANNA), acquire(database, ANNA), acquire(database, BERT)
    assert leases.release_all(database, ANNA, crashed=True) == 2
    assert [(shard.state, shard.attempts) for shard in shards_of(database, job_id)] == [
        ("queued", 1), ("queued", 1), ("leased", 0)
    ]  # fmt: skip


def test_a_stale_token_writes_nothing(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 4)
    stale = acquire(database, ANNA)
    rows = results.load(database, stale).rows
    expire_lease(database, stale.shard_id)
    leases.sweep(database)
    current = acquire(database, ANNA)  # the same worker: the token alone tells the leases apart
    before = num_rows_in_tables(database)
    with pytest.raises(LeaseLost):
        results.write(database, stale, [answered(row) for row in rows])
    with pytest.raises(LeaseLost):
        results.count_attempt(database, stale, rows[0])
    with pytest.raises(LeaseLost):
        leases.finish(database, stale)
    with pytest.raises(LeaseLost):
        leases.abandon(database, stale)
    assert not leases.release(database, stale)
    assert num_rows_in_tables(database) == before
    run_shard(database, current)
    check_integrity(database, job_id)


def test_a_stale_owner_writes_nothing_after_the_end(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    rows = results.load(database, lease).rows
    run_shard(database, lease)
    for _ in range(2):
        with pytest.raises(LeaseLost):
            results.write(database, lease, [answered(rows[0])])
        with pytest.raises(LeaseLost):
            leases.finish(database, lease)
    check_integrity(database, job_id)


def test_a_row_written_twice_in_one_lease_is_refused_whole(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    rows = results.load(database, lease).rows
    results.write(database, lease, [answered(rows[0])])
    for again in ([answered(rows[0])], [answered(rows[1]), failed(rows[0])], [answered(rows[2]), answered(rows[2])]):
        with pytest.raises(LeaseLost):
            results.write(database, lease, again)
        check_integrity(database, job_id)
    assert [row.state for row in requests_of(database, job_id)] == ["completed", "queued", "queued", "queued"]


def test_a_row_of_another_shard_is_refused(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 8)
    lease, other = acquire(database), acquire(database)
    foreign = results.load(database, other).rows[0]
    with pytest.raises(LeaseLost):
        results.write(database, lease, [answered(foreign)])
    check_integrity(database, job_id)


def test_a_shard_with_rows_missing_cannot_finish(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    results.write(database, lease, [answered(row) for row in results.load(database, lease).rows[:3]])
    with pytest.raises(LeaseLost, match="missing"):
        leases.finish(database, lease)
    run_shard(database, lease)
    assert job_state(database, job_id) == "completed"


def test_an_attempt_of_one_row_is_counted(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 4)
    lease = acquire(database)
    row = results.load(database, lease).rows[1]
    results.count_attempt(database, lease, row)
    assert [row.attempts for row in results.load(database, lease).rows] == [0, 1, 0, 0]


def test_a_write_of_many_rows_passes_the_databases_parameter_limit(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.UPDATE_ROWS < 32_766  # SQLite's, the lower one
    monkeypatch.setattr(results, "UPDATE_ROWS", 3)
    wide = settings.model_copy(update={"queue": settings.queue.model_copy(update={"shard_rows": 10})})
    job_id = submit_rows(database, wide, 10)
    assert drain(database) == 1
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_a_job_ends_although_its_worker_died_before_it_could_say_it_runs(
    database: Database, settings: Settings
) -> None:
    job_id = submit_rows(database, settings, 4)
    lease = acquire(database)
    with database.write() as connection:  # as if the second half of `acquire` had not happened
        connection.execute(text("UPDATE jobs SET state = 'queued', started_at = NULL"))
    run_shard(database, lease)
    leases.sweep(database)
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_a_sweep_ends_a_job_whose_worker_died_between_its_last_shard_and_its_end(
    database: Database, settings: Settings
) -> None:
    job_id = submit_rows(database, settings, 4)
    run_shard(database, acquire(database))
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET state = 'running', finished_at = NULL, num_completed = 0"))
    leases.sweep(database)
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_cancelling_keeps_finished_rows_and_ends_once_leases_are_let_go(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 12)
    run_shard(database, acquire(database))
    lease = acquire(database)
    results.write(database, lease, [answered(results.load(database, lease).rows[0])])
    assert ending.cancel(database, job_id) == "cancelling"
    assert results.load(database, lease).job_state == "cancelling"
    leases.abandon(database, lease)
    assert job_state(database, job_id) == "cancelled"
    assert [row.state for row in requests_of(database, job_id)] == ["completed"] * 5 + ["cancelled"] * 7
    check_integrity(database, job_id)
    with pytest.raises(Conflict, match="cancelled already"):
        ending.cancel(database, job_id)


def test_cancelling_what_nobody_runs_ends_it_at_once(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 6)
    assert ending.cancel(database, job_id) == "cancelled"
    check_integrity(database, job_id)
    assert leases.acquire(database, MODEL, ANNA, LEASE_S) is None


def test_a_cancelled_jobs_worker_may_still_finish_or_die(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 8)
    finishing, dying = acquire(database, ANNA), acquire(database, BERT)
    ending.cancel(database, job_id)
    assert ending.cancel(database, job_id) == "cancelling"  # twice is harmless
    run_shard(database, finishing)
    assert job_state(database, job_id) == "cancelling"
    expire_lease(database, dying.shard_id)
    leases.sweep(database)
    assert job_state(database, job_id) == "cancelled"
    assert [row.state for row in requests_of(database, job_id)] == ["completed"] * 4 + ["cancelled"] * 4
    check_integrity(database, job_id)


def test_a_late_abandon_never_cancels_the_rows_of_a_retry(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stops between releasing its shard and cancelling it; meanwhile the job ends and is retried."""
    job_id = submit_rows(database, settings, 8)
    run_shard(database, acquire(database), failed)
    lease = acquire(database)
    ending.cancel(database, job_id)
    release = leases.release

    def release_and_stop(*args: object, **options: bool) -> bool:
        released = release(*args, **options)  # type: ignore[arg-type]
        leases.sweep(database)
        ending.retry(database, job_id)
        return released

    monkeypatch.setattr(leases, "release", release_and_stop)
    leases.abandon(database, lease)
    assert job_state(database, job_id) == "queued"
    drain(database)
    assert job_state(database, job_id) == "completed"
    assert [row.state for row in requests_of(database, job_id)] == ["completed"] * 4 + ["cancelled"] * 4
    check_integrity(database, job_id)


def test_a_retry_runs_failed_rows_alone_and_not_those_refused_at_submit(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, {"prompt": ["a", None, "c", "d", "e", "f", "g", "h"]}).job_id
    with pytest.raises(Conflict, match="is queued: wait"):
        ending.retry(database, job_id)
    drain(database, lambda row: failed(row) if row.row_index in (2, 5) else answered(row))
    assert job_state(database, job_id) == "completed"
    kept = {row.row_index: row for row in requests_of(database, job_id) if row.state == "completed"}
    assert ending.retry(database, job_id) == 2
    assert job_state(database, job_id) == "queued"
    seen: list[int] = []

    def answer(row: results.PendingRow) -> results.RowResult:
        seen.append(row.row_index)
        return answered(row)

    drain(database, answer)
    assert seen == [2, 5]
    rows = requests_of(database, job_id)
    assert [row.row_index for row in rows if row.state == "failed"] == [1]
    assert all(rows[index] == row for index, row in kept.items())
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)
    with pytest.raises(Conflict, match="no failed row"):
        ending.retry(database, job_id)


def test_a_failed_job_says_why_and_can_be_retried_whole(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 8)
    run_shard(database, acquire(database))
    lease = acquire(database)
    ending.fail_job(database, job_id, "no model\x00 here\nat all")
    assert job_state(database, job_id) == "failed"
    check_integrity(database, job_id)
    with pytest.raises(LeaseLost):
        leases.finish(database, lease)
    assert {row.error for row in requests_of(database, job_id) if row.state == "failed"} == {
        "no model\ufffd here at all"
    }
    ending.fail_job(database, job_id, "again")  # too late: it has ended
    assert ending.retry(database, job_id) == 4
    drain(database)
    assert job_state(database, job_id) == "completed"
    check_integrity(database, job_id)


def test_an_unknown_job_is_not_found(database: Database) -> None:
    for act in (ending.cancel, ending.retry):
        for job_id in ("none", "with\x00nul", ""):
            with pytest.raises(NotFound, match="no job"):
                act(database, job_id)


def test_the_hot_queries_never_scan_a_table(database: Database, settings: Settings) -> None:
    if not database.is_sqlite:
        pytest.skip("PostgreSQL's planner rightly scans tables this small")
    submit_rows(database, settings, 8)
    seen: list[tuple[str, Any]] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: seen.append((args[2], args[3])))
    lease = acquire(database)
    leases.renew(database, ANNA, LEASE_S)
    rows = results.load(database, lease).rows
    results.write(database, lease, [answered(rows[0]), failed(rows[1])])
    results.write(database, lease, [answered(row) for row in rows[2:]])
    leases.finish(database, lease)
    leases.sweep(database)
    queries = [(text, values) for text, values in seen if text.startswith(("SELECT", "UPDATE"))]
    assert len(queries) > 6
    with database.read() as connection:
        plans = [
            (str(step.detail), query)
            for query, values in queries
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)
        ]
    # A scan of the partial index of leases is a look at the shards in flight alone.
    scans = [plan for plan in plans if plan[0].startswith("SCAN") and "ix_shards_leases" not in plan[0]]
    assert [plan for plan in scans if "shards" in plan[0] or "requests" in plan[0]] == []
    assert any("ix_shards_open" in plan for plan, _ in plans)
    assert any("ix_shards_queue" in plan for plan, _ in plans)
