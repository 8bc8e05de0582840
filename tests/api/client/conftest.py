"""One real server process for the tests of a file, its client, and a proxy before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_support import finish_shard
from client_support import settings_in
from database_fixtures import Templates
from flaky_proxy import FlakyProxy
from server_process import Server, until
from sqlalchemy import select

from db.models import Shard
from db.session import Database
from jobs.client import (
    Client,
)
from jobs.settings import Settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, broker_url: str, templates: Templates) -> Settings:
    """Of all tests that can share a service: none may leave a shard that another test would answer in its place."""
    return settings_in(tmp_path_factory.mktemp("service") / "home", broker_url, templates)


@pytest.fixture(scope="module")
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sqlalchemy_url)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    until(server.is_up, 60)
    yield server
    server.terminate()


@pytest.fixture
def files(settings: Settings) -> Path:
    """The folder that the service may read and write."""
    return settings.home.parent / "files"


@pytest.fixture(autouse=True)
def _no_shard_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "database" in request.fixturenames or "client" in request.fixturenames:
        database: Database = request.getfixturevalue("database")
        with database.read() as connection:
            waiting = connection.scalars(select(Shard.id).where(Shard.state == "queued")).all()
        for _ in waiting:
            finish_shard(database)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=120, retry_for_s=20) as client:
        yield client


@pytest.fixture
def proxy(server: Server) -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(server.port)
    yield proxy
    proxy.close()
