"""Connections. `Database.write()` is one transaction that may change things, `Database.read()` one that may not."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url

SQLITE_BUSY_TIMEOUT_S = 60.0
"""How long a SQLite writer waits for another one; bulk submits hold the lock for seconds."""
IDLE_IN_TRANSACTION_S = 60
"""PostgreSQL ends a transaction whose client has said nothing for so long; ours never think in between."""
CONNECT_TIMEOUT_S = 10
"""A PostgreSQL host that does not answer is an error after this long, not a hang."""


class Database:
    """An engine for one database URL, with the two kinds of transaction. Safe to share between `threading.Thread`s."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self.engine = _sqlite_engine(url)
        else:
            self.engine = create_engine(
                url,
                hide_parameters=True,
                pool_pre_ping=True,
                pool_size=8,
                max_overflow=24,
                connect_args={"connect_timeout": CONNECT_TIMEOUT_S},
            )
            event.listen(self.engine, "connect", _bound_idle_transactions)
        # A sibling engine over the same pool; the option reaches the "begin" listener below.
        self._writer = self.engine.execution_options(forq_write=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits on leaving, or rolls back on an exception.

        On SQLite it takes the write lock at once (BEGIN IMMEDIATE): a transaction that reads first and writes later
        would fail, or lose the update, when another writer came between.
        """
        with self._writer.begin() as connection:
            yield connection

    def dispose(self) -> None:
        self.engine.dispose()


def _bound_idle_transactions(connection: Any, _record: Any) -> None:
    """A process that was stopped in the middle of a transaction must not hold its locks for ever."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
    connection.commit()


def _sqlite_engine(url: str) -> Engine:
    database = make_url(url).database
    if database and database != ":memory:":
        Path(database).parent.mkdir(parents=True, exist_ok=True)
    # Parameters are prompts: they must not appear in an exception's text.
    engine = create_engine(
        url, hide_parameters=True, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin by itself; _begin does
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "cache_size=-16384"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("forq_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine
