"""A real server that speaks S3, settings that allow two of its folders, and the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server, set_credentials, storage_at

from jobs.settings import Settings


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("moto") / "log")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)


@pytest.fixture
def settings(tmp_path: Path, s3: S3Server) -> Settings:
    return Settings(home=tmp_path / "home", storage=storage_at(s3.url))
