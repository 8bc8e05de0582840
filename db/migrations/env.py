"""Alembic's entry: runs the migrations online, in batches where SQLite cannot alter a table in place."""

from typing import Any

from alembic import context
from sqlalchemy import event, text

from db.models import Base
from db.session import Database

ADVISORY_LOCK = 0x666F7271  # "forq": PostgreSQL machines that start together migrate one after the other


def run() -> None:
    url = context.config.get_main_option("sqlalchemy.url")
    assert url, "db.upgrade sets the URL"
    database = Database(url)
    if database.is_sqlite:
        # A batch drops the old table, and dropping a table deletes its rows first: with foreign keys on, all that hangs
        # on them would go, too. The switch works outside a transaction only.
        event.listen(database.engine, "connect", _without_foreign_keys)
    try:
        with database.write() as connection:
            if not database.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
            with context.begin_transaction():
                context.run_migrations()
    finally:
        database.dispose()


def _without_foreign_keys(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=OFF")


run()
