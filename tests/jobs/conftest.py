from pathlib import Path

import pytest
from batches import settings_in
from database_fixtures import database, database_url, postgresql_server, templates

from jobs.settings import Settings

__all__ = ["database", "database_url", "postgresql_server", "templates"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Shards of 4 rows, and a second model; nothing of the machine's own configuration."""
    monkeypatch.chdir(tmp_path)
    return settings_in(tmp_path / "home")
