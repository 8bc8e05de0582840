"""Every check finds the fault that is planted for it, and nothing on a healthy database; repairs are the service's."""

import tempfile
from pathlib import Path

import pytest
from batches import OWNER, acquire, check_integrity, expire_lease, job_state, submit_rows
from healthy import add_worker, age_file, ended_job, fill
from sqlalchemy import text

from db.session import Database
from db.upgrade import downgrade, upgrade
from jobs.settings import Settings
from jobs.upkeep.checks import CHECKS
from jobs.upkeep.doctor import Finding, examine


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("jobs.upkeep.leftovers.socket_folders", lambda: [tmp_path / "scratch"])  # not the machine's


def found(database: Database, settings: Settings) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(database, settings).findings}


def plant(database: Database, statement: str) -> None:
    with database.write() as connection:
        assert connection.execute(text(statement)).rowcount == 1


def test_a_healthy_database_has_no_findings(database: Database, settings: Settings) -> None:
    fill(database, settings)
    add_worker(database, OWNER)
    add_worker(database, "B" * 26, heartbeat="2001", exited="2001")
    report = examine(database, settings)
    assert report.findings == []
    assert report.is_healthy
    assert list(report.seconds) == [check.name for check in CHECKS]
    assert report.summary == f"{len(CHECKS)} checks: no findings"


def test_an_empty_database_has_no_findings(database: Database, settings: Settings) -> None:
    assert examine(database, settings).is_healthy


ONE = "(SELECT min(id) FROM {0} WHERE {1})"
FIRST_DONE = ONE.format("shards", "state = 'done'")
ANSWERED = ONE.format("requests", "state = 'completed'")
FAILED = ONE.format("requests", "state = 'failed'")
COMPLETED_JOB = ONE.format("jobs", "state = 'completed'")
LEASED = ONE.format("shards", "state = 'leased'")
FAULTS = {
    "shards cover their job": f"UPDATE shards SET end_row = end_row - 1 WHERE id = {FIRST_DONE}",
    "every row is there once": f"DELETE FROM requests WHERE id = {FAILED}",
    "shards count their rows": f"UPDATE shards SET num_completed = 3, num_failed = 1 WHERE id = {FIRST_DONE}",
    "shards count their tokens": f"UPDATE shards SET output_tokens = output_tokens + 1 WHERE id = {FIRST_DONE}",
    "ended shards are whole": f"UPDATE shards SET num_failed = num_failed + 1 WHERE id = {FIRST_DONE}",
    "ended jobs have their shards' totals": f"UPDATE jobs SET num_failed = num_failed + 1 WHERE id = {COMPLETED_JOB}",
    "rows have their answers": f"DELETE FROM outputs WHERE request_id = {ANSWERED}",
    "answers have statistics": f"DELETE FROM request_stats WHERE request_id = {ANSWERED}",
    "statistics have answers": f"DELETE FROM outputs WHERE request_id = {ANSWERED}",
    "trees cover their answer": f'UPDATE thread_nodes SET "end" = 9 WHERE request_id = {ANSWERED} AND node = 1',
    "leases are whole": f"UPDATE shards SET lease_owner = NULL WHERE id = {LEASED}",
    "finished jobs have ended": f"UPDATE jobs SET state = 'running' WHERE id = {COMPLETED_JOB}",
    "cancelled jobs have ended": f"UPDATE jobs SET state = 'cancelling' WHERE id = {COMPLETED_JOB}",
    "webhooks are told": "UPDATE webhook_deliveries SET next_attempt_at = '2001-01-01 00:00:00.0' WHERE id = 1",
    "expired leases are swept": f"UPDATE shards SET lease_expires_at = '2001-01-01 00:00:00.0' WHERE id = {LEASED}",
}


@pytest.mark.parametrize(("check", "statement"), FAULTS.items(), ids=FAULTS)
def test_a_planted_fault_is_found(database: Database, settings: Settings, check: str, statement: str) -> None:
    fill(database, settings)
    plant(database, statement)
    finding = found(database, settings)[check]
    assert finding.num == 1
    assert finding.example
    assert finding.line.startswith(f"{finding.what}: 1, such as {finding.example}; ")


OTHER_FAULTS = {
    "a gap between nodes": (
        "trees cover their answer", f"UPDATE thread_nodes SET start = 0 WHERE request_id = {ANSWERED} AND node = 1"
    ),
    "a node too few": (
        "trees cover their answer", f"DELETE FROM thread_nodes WHERE request_id = {ANSWERED} AND node = 1"
    ),
    "an answer too many": (
        "rows have their answers",
        "INSERT INTO outputs (request_id, sample, text, prompt_tokens, output_tokens) "
        f"VALUES ({ANSWERED}, 1, 'x', 1, 0)",
    ),
    "an answer of a failed row": (
        "rows have their answers",
        f"INSERT INTO outputs (request_id, sample, text, prompt_tokens, output_tokens) VALUES ({FAILED}, 0, 'x', 1, 0)",
    ),
    "a surplus row": (
        "every row is there once",
        "INSERT INTO requests (job_id, row_index, state) "
        f"SELECT {COMPLETED_JOB}, 1000, 'failed'",
    ),
    "an ended job with an open shard": (
        "ended jobs have their shards' totals", f"UPDATE shards SET state = 'queued' WHERE id = {FIRST_DONE}"
    ),
    "a job without shards": (
        "shards cover their job", "UPDATE jobs SET num_rows = num_rows + 1 WHERE state = 'queued'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("check", "statement"), OTHER_FAULTS.values(), ids=OTHER_FAULTS)
def test_other_shapes_of_the_same_faults_are_found(
    database: Database, settings: Settings, check: str, statement: str
) -> None:
    fill(database, settings)
    plant(database, statement)
    assert found(database, settings)[check].num == 1


def test_an_answer_with_statistics_and_no_tree_is_found(database: Database, settings: Settings) -> None:
    fill(database, settings)
    with database.write() as connection:
        connection.exec_driver_sql(f"DELETE FROM thread_nodes WHERE request_id = {ANSWERED}")
    finding = found(database, settings)["statistics have trees"]
    assert finding.num == 1
    assert str(finding.example).endswith(" row 0")


def test_a_row_whose_parent_is_gone_is_found(database: Database, settings: Settings) -> None:
    if not database.is_sqlite:
        pytest.skip("PostgreSQL's foreign keys cannot be switched off by a user")
    ended_job(database, settings)
    with database.engine.connect() as connection:
        raw = connection.connection.driver_connection
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute("DELETE FROM requests WHERE row_index = 0")
        raw.execute("PRAGMA foreign_keys=ON")
    finding = found(database, settings)["foreign keys lead to rows"]
    assert finding.num == 4  # an output, its statistics, two nodes


def test_a_damaged_file_is_found_and_nothing_is_repaired_in_it(database: Database, settings: Settings) -> None:
    if not database.is_sqlite:
        pytest.skip("the file is SQLite's")
    job_id = ended_job(database, settings, 400)
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET state = 'running'"))
    with database.read() as connection:
        root = connection.exec_driver_sql("SELECT rootpage FROM sqlite_schema WHERE name = 'ix_shards_queue'").scalar()
    path = Path(str(database.url.database))
    with database.engine.connect() as connection:
        connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.dispose()
    with path.open("r+b") as file:
        file.seek((int(root) - 1) * 4096)
        file.write(b"\xff" * 4096)
    report = examine(database, settings, repair=True)
    assert "SQLite's file is whole" in [finding.check for finding in report.findings]
    assert not any(finding.repaired for finding in report.findings)
    assert job_state(database, job_id) == "running"


def test_a_schema_of_another_version_ends_the_examination(
    database: Database, database_url: str, settings: Settings
) -> None:
    database.dispose()
    downgrade(database_url, "-1")
    try:
        report = examine(database, settings)
        assert [finding.check for finding in report.findings] == ["the schema is this version's"]
        assert "forq db upgrade" in report.findings[0].line
        assert len(report.seconds) == 1
    finally:
        database.dispose()
        upgrade(database_url)


def test_a_check_that_cannot_run_is_a_finding_and_the_others_go_on(database: Database, settings: Settings) -> None:
    fill(database, settings)
    plant(database, f"UPDATE requests SET sampling = 'no JSON' WHERE id = {ANSWERED}")
    report = examine(database, settings)
    (finding,) = report.findings
    assert finding.line.startswith("could not check that rows have their answers: 1, such as ")
    assert len(report.seconds) == len(CHECKS)


def test_workers_without_a_pulse_are_found(database: Database, settings: Settings) -> None:
    add_worker(database, "A" * 26, heartbeat="2001")
    add_worker(database, "B" * 26)
    finding = found(database, settings)["workers have a pulse"]
    assert (finding.num, finding.example) == (1, f"{'A' * 26} on here")


def test_leases_of_workers_that_exited_are_found_and_given_back(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 8)
    add_worker(database, OWNER, exited="2001")
    held, other = acquire(database), acquire(database, "B" * 26)
    assert found(database, settings)["leases have living owners"].num == 1
    report = examine(database, settings, repair=True)
    assert [finding.repaired for finding in report.findings] == [True]
    assert report.is_healthy
    assert acquire(database, "C" * 26).shard_id == held.shard_id != other.shard_id
    check_integrity(database, job_id)


def test_repair_sweeps_and_settles_and_says_so(database: Database, settings: Settings) -> None:
    jobs = fill(database, settings)
    for shard_id in shard_ids(database, "leased"):
        expire_lease(database, shard_id)
    plant(database, f"UPDATE jobs SET state = 'running' WHERE id = '{jobs['completed']}'")
    report = examine(database, settings, repair=True)
    assert {finding.check for finding in report.findings} == {
        "finished jobs have ended",
        "expired leases are swept",
    } or (
        {finding.check for finding in report.findings} == {"finished jobs have ended"}  # its sweep took them along
    )
    assert report.is_healthy
    assert "1 repaired" in report.summary
    assert report.findings[0].line.endswith("; repaired")
    assert shard_ids(database, "leased") == []
    assert job_state(database, jobs["completed"]) == "completed"
    assert job_state(database, jobs["cancelling"]) == "cancelled"
    for job_id in jobs.values():
        check_integrity(database, job_id)


def shard_ids(database: Database, state: str) -> list[int]:
    with database.read() as connection:
        return list(connection.execute(text("SELECT id FROM shards WHERE state = :state"), {"state": state}).scalars())


def test_without_repair_nothing_is_changed(database: Database, settings: Settings) -> None:
    jobs = fill(database, settings)
    plant(database, FAULTS["finished jobs have ended"])
    stray = age_file(stored(settings, "ab"))
    assert not examine(database, settings).is_healthy
    assert job_state(database, jobs["running"]) == "running"
    assert "running" in {job_state(database, jobs[name]) for name in ("completed", "samples", "refused")}
    assert stray.exists()


def stored(settings: Settings, digits: str) -> Path:
    path = settings.data_dir / f"{digits * 32}.parquet"
    path.write_bytes(b"x")
    return path


def test_each_check_is_shown_as_it_runs(database: Database, settings: Settings) -> None:
    shown: list[tuple[str, bool]] = []
    examine(database, settings, show=lambda name, found, seconds: shown.append((name, found is not None)))
    assert shown == [(check.name, is_done) for check in CHECKS for is_done in (False, True)]
