"""The commands that look after what is stored: purge, doctor, db backup."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from cli_support import Forq

from db.session import Database
from jobs.upkeep import checks

NO_JOB = "01JDQXK8V0E3M5T9ZB4W6Y7N2A"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("jobs.upkeep.leftovers.socket_folders", lambda: [tmp_path / "scratch"])  # not the machine's


@pytest.fixture
def cancelled(home: Path, run: Forq, prompts: Path) -> str:
    """A job that was cancelled in 2001."""
    job: str = json.loads(run("submit", prompts, "--json").out)["job_id"]
    assert run("cancel", job).exit_code == 0
    execute(home, "UPDATE jobs SET finished_at = '2001-01-01 00:00:00.000000'")
    return job


def execute(home: Path, statement: str) -> None:
    database = Database(f"sqlite:///{home / 'forq.db'}")
    with database.write() as connection:
        connection.exec_driver_sql(statement)
    database.dispose()


def test_purge_says_first_what_would_go_and_then_what_went(home: Path, run: Forq, cancelled: str) -> None:
    for path in (home / "data").iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    said = run("purge", "--older-than", "30d", "--dry-run")
    assert said.exit_code == 0
    assert said.out.startswith("would delete 1 jobs: 3 rows, 0 answers\nwould delete 1 submitted files: ")
    assert cancelled in run("list").out
    done = run("purge", "--older-than", "30d", "--job", cancelled.lower())
    assert done.out.startswith("deleted 1 jobs: 3 rows, 0 answers\ndeleted 1 submitted files: ")
    assert "rows: 3 of 3" in done.err
    assert cancelled not in run("list").out
    assert list((home / "data").iterdir()) == []


def test_purge_as_json_and_with_vacuum(home: Path, run: Forq, cancelled: str) -> None:
    said = json.loads(run("purge", "--older-than", "P30D", "--vacuum", "--json").out)
    assert (said["jobs"], said["rows"], said["skipped"], said["dry_run"]) == (1, 3, 0, False)
    assert said["database_free_bytes"] == 0
    assert said["disk_bytes"] >= 0


def test_purge_says_what_went_also_where_the_file_cannot_be_shrunk(
    run: Forq, cancelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=9))
    done = run("purge", "--older-than", "30d", "--vacuum")
    assert done.exit_code == 1
    assert done.out.startswith("deleted 1 jobs")
    assert "forq: --vacuum needs" in done.err


@pytest.mark.parametrize("age", ["30", "soon", "", "-1d", "0d", "0h", "nan", "1e9d", "30m", "99999999d", "h", "2w"])
def test_an_age_that_is_none_is_refused_in_one_line(run: Forq, age: str) -> None:
    refused = run("purge", "--older-than", age)
    assert refused.exit_code == 2
    assert refused.err.count("\n") == 1
    assert "--older-than" in refused.err


@pytest.mark.parametrize("age", ["30d", "12h", "P30D", "PT12H", "1 day", "30D"])
def test_ages_are_read_in_days_hours_and_iso_8601(run: Forq, age: str) -> None:
    assert run("purge", "--older-than", age).exit_code == 0


def test_purge_needs_an_age(run: Forq) -> None:
    assert run("purge").exit_code == 2


def test_purge_of_a_job_that_has_not_ended_is_refused(run: Forq, prompts: Path, cancelled: str) -> None:
    job = json.loads(run("submit", prompts, "--json").out)["job_id"]
    refused = run("purge", "--older-than", "1d", "--job", cancelled, "--job", job)
    assert refused.exit_code == 1
    assert refused.err == f"forq: job {job} is queued: wait for its end, or cancel it, before a purge\n"
    assert cancelled in run("list").out
    assert run("purge", "--older-than", "1d", "--job", NO_JOB).exit_code == 2


def test_doctor_of_a_healthy_home_says_so(run: Forq, cancelled: str) -> None:
    done = run("doctor")
    assert (done.exit_code, done.out, done.err) == (0, f"{len(checks.CHECKS)} checks: no findings\n", "")
    said = json.loads(run("doctor", "--json").out)
    assert said["healthy"]
    assert said["findings"] == []
    assert len(said["seconds"]) == len(checks.CHECKS)


def test_doctor_says_what_how_many_which_and_what_helps_in_a_line_each(home: Path, run: Forq, cancelled: str) -> None:
    execute(home, "UPDATE jobs SET state = 'cancelling', finished_at = NULL")
    execute(home, "UPDATE shards SET num_cancelled = 2, num_failed = 1")
    done = run("doctor")
    assert done.exit_code == 1
    counters, stalled, summary = done.out.splitlines()
    assert counters.startswith(
        f"shards whose counters are not their rows' states: 1, such as {cancelled} rows 0-2; no command mends this"
    )
    assert stalled == (
        f"jobs being cancelled that nobody works on: 1, such as {cancelled}; "
        "any worker's next sweep does it; --repair does it now"
    )
    assert summary == f"{len(checks.CHECKS)} checks: 2 findings"
    repaired = run("doctor", "--repair", "--json")
    assert repaired.exit_code == 1
    said = json.loads(repaired.out)
    assert [finding["repaired"] for finding in said["findings"]] == [False, True]
    assert not said["healthy"]
    assert json.loads(run("status", cancelled, "--json").out)["state"] == "cancelled"


def test_doctor_exits_well_when_everything_is_repaired(home: Path, run: Forq, cancelled: str) -> None:
    execute(home, "UPDATE jobs SET state = 'cancelling', finished_at = NULL")
    done = run("doctor", "--repair")
    assert (done.exit_code, done.out.splitlines()[-1]) == (0, f"{len(checks.CHECKS)} checks: 1 finding, 1 repaired")


def test_doctor_shows_each_check_on_a_terminal(
    run: Forq, cancelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from jobs.upkeep import cli

    monkeypatch.setattr(cli, "shows_checks", lambda: True)
    lines = run("doctor").err.splitlines()
    assert len(lines) == len(checks.CHECKS)
    assert lines[3].startswith("shards cover their job … ok (0.")


def test_backup_copies_and_says_where(home: Path, run: Forq, cancelled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("db", "backup", "copy.db")
    assert done.exit_code == 0
    assert done.out == f"{Path('copy.db').stat().st_size:,} bytes in copy.db\n"
    refused = run("db", "backup", "copy.db")
    assert refused.exit_code == 1
    assert refused.err.splitlines()[-1] == f"forq: {Path.cwd()}/copy.db: it exists already: --force replaces it"
    assert json.loads(run("db", "backup", "copy.db", "--force", "--json").out)["file"] == "copy.db"
    monkeypatch.setenv("FORQ_DATABASE_URL", f"sqlite:///{Path('copy.db').absolute()}")
    assert cancelled in run("list").out


def test_backup_of_nothing_says_so(run: Forq) -> None:
    refused = run("db", "backup", "copy.db")
    assert refused.exit_code == 1
    assert refused.err.endswith("forq.db: no database is there\n")


def test_backup_of_postgresql_names_the_command_without_the_password(
    run: Forq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORQ_DATABASE_URL", "postgresql://forq:secret@db.internal:5433/forq")
    refused = run("db", "backup", "copy here.db")
    assert refused.exit_code == 2
    assert "`pg_dump --format=custom --file='copy here.db' postgresql://forq@db.internal:5433/forq`" in refused.err
    assert "secret" not in refused.err
