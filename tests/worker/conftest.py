from collections.abc import Iterator
from pathlib import Path

import pytest
from database_fixtures import Templates, postgresql_server, templates

from db.session import Database
from jobs.settings import QueueSettings, Settings

__all__ = ["postgresql_server", "templates"]


@pytest.fixture
def sqlite_url(templates: Templates, tmp_path: Path) -> str:
    """A fresh, migrated SQLite database: statements are the data layer's tests' business, loops are ours."""
    return templates.copy("sqlite", tmp_path)


@pytest.fixture
def database(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.dispose()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Shards of 4 rows; nothing of the machine's own configuration."""
    monkeypatch.chdir(tmp_path)
    return Settings(home=tmp_path / "home", queue=QueueSettings(shard_rows=4, flush_s=0.01, rows_in_flight=64))
