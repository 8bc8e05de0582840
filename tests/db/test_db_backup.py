"""A backup is of one moment while others write, and is there whole or not at all."""

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from database_fixtures import Templates

from db import backup
from db.backup import back_up
from db.session import Database
from db.upgrade import current_revision, newest_revision

PAGES = 400
TIMEOUT_S = 30.0


@pytest.fixture
def source(templates: Templates, tmp_path: Path) -> Iterator[Database]:
    """With two counters that every transaction moves together, one at each end of the file."""
    (tmp_path / "home").mkdir()
    database = Database(templates.copy("sqlite", tmp_path / "home"))
    with database.write() as connection:
        for statement in (
            "CREATE TABLE first (n INTEGER)",
            "CREATE TABLE filling (bytes BLOB)",
            "CREATE TABLE last (n INTEGER)",
            "INSERT INTO first VALUES (0)",
            f"INSERT INTO filling VALUES (zeroblob({PAGES * 4096}))",
            "INSERT INTO last VALUES (0)",
        ):
            connection.exec_driver_sql(statement)
    yield database
    database.dispose()


def path_of(database: Database) -> Path:
    return Path(str(database.url.database))


def count(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE first SET n = n + 1")
        connection.exec_driver_sql("UPDATE last SET n = n + 1")
        connection.exec_driver_sql("INSERT INTO filling VALUES (zeroblob(8192))")


def counters(path: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(path)) as connection:
        return tuple(connection.execute("SELECT (SELECT n FROM first), (SELECT n FROM last)").fetchone())


def test_a_backup_taken_while_another_thread_writes_is_of_its_first_moment(
    source: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 20)
    is_next, has_written, stop = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def write() -> None:
        while is_next.acquire(timeout=TIMEOUT_S) and not stop.is_set():
            count(source)
            has_written.release()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    steps: list[tuple[int, int]] = []

    def advance(done: int, total: int) -> None:
        """Between any two steps another connection commits."""
        steps.append((done, total))
        is_next.release()
        assert has_written.acquire(timeout=TIMEOUT_S)

    count(source)
    done = back_up(path_of(source), tmp_path / "copy.db", progress=advance)
    stop.set()
    is_next.release()
    writer.join(TIMEOUT_S)
    assert counters(done.path) == (1, 1)
    assert counters(path_of(source)) == (1 + len(steps), 1 + len(steps))
    assert len(steps) > PAGES // 20
    assert [step for step, _ in steps] == sorted({step for step, _ in steps})  # it never began again
    assert steps[-1][0] == steps[-1][1] == done.num_bytes // 4096


def test_a_backup_is_a_database_of_its_own(source: Database, tmp_path: Path) -> None:
    done = back_up(path_of(source), tmp_path / "copy.db")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["copy.db"]
    copy = Database(f"sqlite:///{done.path}")
    assert current_revision(copy) == newest_revision()
    count(copy)
    copy.dispose()
    assert (counters(done.path), counters(path_of(source))) == ((1, 1), (0, 0))


def test_what_was_committed_to_the_log_alone_is_in_the_backup(source: Database, tmp_path: Path) -> None:
    count(source)
    assert Path(f"{path_of(source)}-wal").stat().st_size > 0
    assert counters(back_up(path_of(source), tmp_path / "copy.db").path) == (1, 1)


def test_a_file_that_exists_is_replaced_only_by_force(source: Database, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("precious")
    with pytest.raises(FileExistsError, match="--force replaces it"):
        back_up(path_of(source), target)
    assert target.read_text() == "precious"
    back_up(path_of(source), target, force=True)
    assert counters(target) == (0, 0)


def test_a_file_that_comes_while_the_copy_is_made_is_not_replaced(source: Database, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    with pytest.raises(FileExistsError, match="--force replaces it"):
        back_up(path_of(source), target, progress=lambda done, total: target.write_text("precious") and None)
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "home"]


def test_not_even_force_replaces_the_database_itself_or_a_folder(source: Database, tmp_path: Path) -> None:
    for target in (path_of(source), tmp_path / "home"):
        with pytest.raises(FileExistsError, match="name another file"):
            back_up(path_of(source), target, force=True)
    assert counters(path_of(source)) == (0, 0)


def test_without_a_database_there_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no database is there"):
        back_up(tmp_path / "nothing.db", tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_before_anything_is_written(
    source: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes, 1,000 are free") as refused:
        back_up(path_of(source), tmp_path / "copy.db")
    assert refused.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["home"]


def test_a_damaged_database_gives_no_backup(source: Database, tmp_path: Path) -> None:
    with source.read() as connection:
        root = connection.exec_driver_sql("SELECT rootpage FROM sqlite_schema WHERE name = 'last'").scalar_one()
    source.dispose()
    with path_of(source).open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(OSError, match=r"integrity check|malformed"):
        back_up(path_of(source), tmp_path / "copy.db")
    assert os.listdir(tmp_path) == ["home"]


def test_a_copy_that_is_interrupted_leaves_nothing(
    source: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 20)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(path_of(source), tmp_path / "copy.db", progress=interrupt)
    assert os.listdir(tmp_path) == ["home"]
