"""Old, ended jobs go whole or not at all; what has not ended, and files on their way, stay."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from batches import (
    OWNER,
    acquire,
    check_integrity,
    drain,
    job_state,
    num_rows_in_tables,
    submit_rows,
    submit_table,
)
from healthy import add_worker, age, age_file, answered_with_trees, ended_job, fill
from sqlalchemy import select
from test_jobs_concurrency import at_once

from db.models import Job, Worker
from db.session import Database
from jobs import ending, store, submit
from jobs.errors import Conflict, NotFound
from jobs.settings import Settings
from jobs.upkeep import leftovers
from jobs.upkeep import purge as purging
from jobs.upkeep.doctor import examine
from jobs.upkeep.purge import Purged, purge

DAY_S = 86_400.0


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("jobs.upkeep.leftovers.socket_folders", lambda: [tmp_path / "scratch"])  # not the machine's


def job_ids(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.scalars(select(Job.id)))


def test_old_ended_jobs_go_with_all_that_is_theirs(database: Database, settings: Settings) -> None:
    jobs = fill(database, settings)
    old = {jobs[name] for name in ("completed", "cancelled", "failed")}
    age(database, *old)
    before = num_rows_in_tables(database)
    done = purge(database, settings, 30 * DAY_S)
    assert done == Purged(dry_run=False, jobs=3, rows=9 + 9 + 5, answers=8 + 4)
    assert job_ids(database) == set(jobs.values()) - old
    after = num_rows_in_tables(database)
    assert before["thread_nodes"] - after["thread_nodes"] == 2 * 12
    assert before["request_stats"] - after["request_stats"] == before["outputs"] - after["outputs"] == 12
    assert examine(database, settings).is_healthy


def test_nothing_that_has_not_ended_is_touched_however_old_it_is(database: Database, settings: Settings) -> None:
    jobs = fill(database, settings)
    age(database, *jobs.values())
    left = {jobs[name] for name in ("running", "cancelling", "queued")}
    purge(database, settings, 1.0)
    assert job_ids(database) == left
    for job_id in left:
        check_integrity(database, job_id)


def test_a_job_that_ended_within_the_limit_stays(database: Database, settings: Settings) -> None:
    job_id = ended_job(database, settings)
    assert purge(database, settings, DAY_S).jobs == 0
    assert job_ids(database) == {job_id}


def test_a_dry_run_says_the_same_and_deletes_nothing(database: Database, settings: Settings) -> None:
    jobs = fill(database, settings)
    age(database, jobs["completed"], jobs["samples"])
    add_worker(database, "B" * 26, exited="2001")
    for path in settings.data_dir.iterdir():
        age_file(path)
    before, files = num_rows_in_tables(database), sorted(settings.data_dir.iterdir())
    said = purge(database, settings, DAY_S, dry_run=True)
    assert said.dry_run
    assert (num_rows_in_tables(database), sorted(settings.data_dir.iterdir())) == (before, files)
    assert said.jobs == 2
    assert said.workers == 1
    done = purge(database, settings, DAY_S)
    assert said == Purged(**{**vars_of(done), "dry_run": True})


def vars_of(purged: Purged) -> dict[str, Any]:
    return {name: getattr(purged, name) for name in Purged.__dataclass_fields__}


def test_only_named_jobs_go_when_jobs_are_named(database: Database, settings: Settings) -> None:
    first, second = ended_job(database, settings), ended_job(database, settings)
    age(database, first, second)
    assert purge(database, settings, DAY_S, [first]).jobs == 1
    assert job_ids(database) == {second}


class Refusal(NamedTuple):
    job: Callable[[Database, Settings], str]
    error: type[Exception]
    text: str


REFUSALS = {
    "running": Refusal(lambda database, settings: fill(database, settings)["running"], Conflict, "wait for its end"),
    "queued": Refusal(lambda database, settings: submit_rows(database, settings, 2), Conflict, "is queued"),
    "young": Refusal(ended_job, Conflict, "give a smaller --older-than"),
    "unknown": Refusal(lambda database, settings: "J" * 26, NotFound, "no job"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_named_job_that_may_not_go_is_refused_before_anything_is_deleted(
    database: Database, settings: Settings, refusal: Refusal
) -> None:
    old = ended_job(database, settings)
    age(database, old)
    job_id = refusal.job(database, settings)
    before = job_ids(database)
    with pytest.raises(refusal.error, match=refusal.text):
        purge(database, settings, DAY_S, [old, job_id])
    assert job_ids(database) == before


def test_a_job_that_is_retried_after_it_was_chosen_stays(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, other = ended_job(database, settings), ended_job(database, settings)
    age(database, job_id, other)
    purge_one = purging.purge_job

    def retried_first(database: Database, chosen: str, *args: Any) -> Any:
        if chosen == job_id:
            ending.retry(database, job_id)
        return purge_one(database, chosen, *args)

    monkeypatch.setattr(purging, "purge_job", retried_first)
    done = purge(database, settings, DAY_S)
    assert (done.jobs, done.skipped) == (1, 1)
    check_integrity(database, job_id)
    drain(database, answered_with_trees)
    assert job_state(database, job_id) == "completed"


@pytest.mark.parametrize("attempt", range(5))
def test_a_purge_and_a_retry_at_once_never_both_win(database: Database, settings: Settings, attempt: int) -> None:
    job_id = ended_job(database, settings, 40)
    age(database, job_id)
    purged, retried = at_once(
        lambda: purge(database, settings, DAY_S), lambda: ending.retry(database, job_id)
    )  # fmt: skip
    if isinstance(retried, NotFound):
        assert purged.jobs == 1
        assert set(num_rows_in_tables(database).values()) == {0}
    else:
        assert retried == 4
        assert purged.jobs == 0
        check_integrity(database, job_id)


def test_two_purges_at_once_delete_each_job_once(database: Database, settings: Settings) -> None:
    jobs = [ended_job(database, settings) for _ in range(6)]
    age(database, *jobs)
    done = at_once(*[lambda: purge(database, settings, DAY_S)] * 2)
    assert [error for error in done if isinstance(error, BaseException)] == []
    assert sum(each.jobs for each in done) == 6
    assert set(num_rows_in_tables(database).values()) == {0}


def test_a_purge_that_is_killed_midway_leaves_the_job_whole(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ended_job(database, settings)
    age(database, job_id)
    before = num_rows_in_tables(database)
    monkeypatch.setattr(purging, "ROWS_PER_STATEMENT", 2)
    seen: list[int] = []

    def stop(phase: str, done: int, total: int) -> None:
        seen.append(done)
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(database, settings, DAY_S, progress=stop)
    assert seen == [2, 4]
    assert num_rows_in_tables(database) == before
    check_integrity(database, job_id)


def test_progress_goes_to_the_last_row_of_the_last_job(database: Database, settings: Settings) -> None:
    age(database, ended_job(database, settings, 5), ended_job(database, settings, 3))
    seen: list[tuple[int, int]] = []
    purge(database, settings, DAY_S, progress=lambda phase, done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (8, 8)


def test_workers_that_ended_long_ago_are_forgotten_and_no_others(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 4)
    acquire(database)
    add_worker(database, OWNER, exited="2001")  # a lease of it is still to be given back
    add_worker(database, "A" * 26, exited="2001")
    add_worker(database, "B" * 26, heartbeat="2001")
    add_worker(database, "C" * 26, exited="now")
    add_worker(database, "D" * 26)
    assert purge(database, settings, 3600.0).workers == 2
    with database.read() as connection:
        assert set(connection.scalars(select(Worker.id))) == {OWNER, "C" * 26, "D" * 26}


def test_a_living_worker_stays_however_short_the_limit(database: Database, settings: Settings) -> None:
    add_worker(database, "A" * 26)
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE workers SET heartbeat_at = '2001-01-01 00:00:00.0', state = 'ready'")
        connection.execute(Worker.__table__.update().values(heartbeat_at=purging.db_now(purging.literal(-3600.0))))
    assert purge(database, settings, 1.0).workers == 0


def stored(settings: Settings, digits: str) -> Path:
    return settings.data_dir / f"{digits * 32}.parquet"


def test_a_file_goes_with_the_last_job_that_names_it(database: Database, settings: Settings) -> None:
    first, second = ended_job(database, settings), ended_job(database, settings)  # the same rows: one file
    (path,) = settings.data_dir.iterdir()
    num_bytes = age_file(path).stat().st_size
    age(database, first)
    assert purge(database, settings, DAY_S).files == 0
    age(database, second)
    done = purge(database, settings, DAY_S)
    assert (done.files, done.file_bytes) == (1, num_bytes)
    assert list(settings.data_dir.iterdir()) == []


def test_a_young_file_without_a_job_stays_until_it_is_old(database: Database, settings: Settings) -> None:
    ended_job(database, settings)
    stored(settings, "ab").write_bytes(b"x")
    assert purge(database, settings, DAY_S).files == 0
    age_file(stored(settings, "ab"))
    assert purge(database, settings, DAY_S).files == 1


@pytest.mark.parametrize("lies_there_already", [False, True])
def test_a_purge_between_a_submits_file_and_its_job_leaves_the_file(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch, lies_there_already: bool
) -> None:
    ended_job(database, settings)
    rows = {"prompt": ["one"]}
    if lies_there_already:  # of a job that was purged long ago
        age(database, submit_table(database, settings, rows).job_id)
        drain(database, answered_with_trees)
        for path in settings.data_dir.iterdir():
            age_file(path)
    insert = submit._insert

    def purge_first(*args: Any) -> Any:
        purge(database, settings, 1.0)
        return insert(*args)

    monkeypatch.setattr(submit, "_insert", purge_first)
    submit_table(database, settings, rows)
    assert "submitted files are there" not in [finding.check for finding in examine(database, settings).findings]


def test_a_file_stored_again_after_the_look_at_it_stays(database: Database, settings: Settings) -> None:
    ended_job(database, settings)
    source = settings.home / "again.parquet"
    source.write_bytes(b"again")
    key = store.keep(settings, source)
    age_file(settings.data_dir / key)
    (left,) = leftovers.unnamed_files(database, settings)
    store.keep(settings, source)
    assert not leftovers.remove_unnamed(left)
    assert (settings.data_dir / key).read_bytes() == b"again"
    assert len(list(settings.data_dir.iterdir())) == 2


def test_a_file_that_another_purge_has_taken_is_no_error(database: Database, settings: Settings) -> None:
    ended_job(database, settings)
    stored(settings, "ab").write_bytes(b"x")
    age_file(stored(settings, "ab"))
    (left,) = leftovers.unnamed_files(database, settings)
    assert leftovers.remove_unnamed(left)
    assert not leftovers.remove_unnamed(left)
