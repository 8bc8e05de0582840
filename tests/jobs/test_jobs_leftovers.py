"""Missing, unnamed and half-written files: what is found, what is removed, and what is left alone."""

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from healthy import age_file, ended_job

from db.session import Database
from jobs.settings import Settings
from jobs.upkeep import leftovers
from jobs.upkeep.doctor import Finding, examine

NOBODY = 2**22 - 1
"""No process has so high a number."""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("jobs.upkeep.leftovers.socket_folders", lambda: [tmp_path / "scratch"])  # not the machine's


def found(database: Database, settings: Settings) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(database, settings).findings}


def stored(settings: Settings, digits: str) -> Path:
    path = settings.data_dir / f"{digits * 32}.parquet"
    path.write_bytes(b"x")
    return path


def test_submitted_files_that_are_missing_are_found(database: Database, settings: Settings) -> None:
    job_id = ended_job(database, settings)
    for path in settings.data_dir.iterdir():
        path.unlink()
    finding = found(database, settings)["submitted files are there"]
    assert (finding.num, finding.example) == (1, f"job {job_id}")


def test_files_that_nobody_names_and_half_written_ones_are_found_and_removed(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    ended_job(database, settings)
    ours = [
        stored(settings, "ab"),
        settings.data_dir / f".incoming.{NOBODY}.0123abcd.tmp",
        tmp_path / "scratch" / "forq-submit-xyz",
    ]
    ours[1].write_bytes(b"half")
    ours[2].mkdir()
    strangers = [
        stored(settings, "cd"),  # young: its job may be on its way
        settings.data_dir / f".incoming.{NOBODY}.0123abce.tmp",  # young
        settings.data_dir / "notes.txt",
        tmp_path / "scratch" / "other",
    ]
    for path in strangers[1:]:
        path.write_bytes(b"x")
    for path in (*ours, *strangers[2:]):
        age_file(path)
    kept = sorted(path for path in settings.data_dir.iterdir() if path not in ours)
    findings = found(database, settings)
    assert findings["submitted files have a job"].example == ours[0].name
    assert findings["nothing is left half-written"].num == 2
    assert examine(database, settings, repair=True).is_healthy
    assert sorted(settings.data_dir.iterdir()) == kept
    assert not ours[2].exists()
    assert strangers[-1].exists()


def test_a_half_written_file_is_left_while_its_process_lives(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_job(database, settings)
    monkeypatch.setattr(leftovers, "OLD_S", -1.0)  # everything is old
    for pid in (os.getppid(), NOBODY):
        (settings.data_dir / f".incoming.{pid}.0123abcd.tmp").write_bytes(b"half")
    finding = found(database, settings)["nothing is left half-written"]
    assert (finding.num, finding.example) == (1, str(settings.data_dir / f".incoming.{NOBODY}.0123abcd.tmp"))


def test_a_submits_scratch_folder_is_left_while_a_process_has_a_file_in_it_open(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch" / "forq-submit-xyz"
    scratch.mkdir()
    with (scratch / "rows.arrow").open("wb"):
        age_file(scratch / "rows.arrow")
        age_file(scratch)
        assert examine(database, settings).is_healthy
    age_file(scratch / "rows.arrow")
    assert found(database, settings)["nothing is left half-written"].example == str(scratch)


def test_a_readers_socket_folder_is_left_while_its_process_lives(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server listens there for as long as the API runs: days."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    folders = {}
    for name, pid in (("mine", os.getpid()), ("dead", 999_999_999), ("young", 999_999_999)):
        folders[name] = tmp_path / "scratch" / f"forq-reader-{pid}-{name}"
        folders[name].mkdir(parents=True)
    began_s = psutil.Process().create_time()
    old_s = time.time() - 2 * leftovers.OLD_S
    os.utime(folders["dead"], (old_s, old_s))
    monkeypatch.setattr(leftovers, "OLD_S", time.time() - began_s - 1)  # what this process wrote at its start is old
    os.utime(folders["mine"], (began_s + 0.5, began_s + 0.5))
    found = [left.path for left in leftovers.dead_temporaries(settings)]
    assert [path for path in found if path.parent == tmp_path / "scratch"] == [folders["dead"]]


def test_no_file_is_unnamed_where_the_database_has_no_job(database: Database, settings: Settings) -> None:
    """Such a database is rather the wrong one."""
    settings.data_dir.mkdir(parents=True)
    age_file(stored(settings, "ab"))
    assert examine(database, settings).is_healthy
