"""Shrinking the SQLite file after a purge."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from healthy import age, ended_job
from sqlalchemy import func, select

from db.models import Job
from db.session import Database
from jobs.errors import BadInput, Unavailable
from jobs.settings import Settings
from jobs.upkeep import space
from jobs.upkeep.doctor import examine
from jobs.upkeep.purge import purge

DAY_S = 86_400.0


def test_the_sqlite_file_shrinks_when_it_is_asked_to(database: Database, settings: Settings) -> None:
    if not database.is_sqlite:
        with pytest.raises(BadInput, match="--vacuum is for SQLite"):
            space.check_backend(database)
        return
    age(database, ended_job(database, settings, 3000))
    purge(database, settings, DAY_S)
    free, path = space.free_bytes(database), Path(str(database.url.database))
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(Job)).scalar_one() == 0
    assert free > 100_000
    assert space.vacuum(database) > 0
    assert space.free_bytes(database) == 0
    assert path.stat().st_size < 200_000
    assert examine(database, settings).is_healthy


def test_a_disk_without_room_for_the_shrinking_is_said(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not database.is_sqlite:
        pytest.skip("for SQLite's file only")
    usage = shutil.disk_usage(settings.home.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=9))
    with pytest.raises(Unavailable, match=r"--vacuum needs [\d,]+ bytes in .*, 9 are free"):
        space.vacuum(database)


def test_shrinking_beside_a_writer_that_holds_on_says_so_and_changes_nothing(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not database.is_sqlite:
        pytest.skip("for SQLite's file only")
    monkeypatch.setattr(space, "SQLITE_BUSY_TIMEOUT_S", 0.0)
    writer = sqlite3.connect(str(database.url.database), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="when no job runs"):
        space.vacuum(database)
    writer.close()
