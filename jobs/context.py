"""What every command begins with: the settings and a database at the right schema."""

import contextlib
from collections.abc import Iterator

from db.session import Database
from jobs.logs import configure_logs
from jobs.settings import Settings, get_settings


@contextlib.contextmanager
def open_service() -> Iterator[tuple[Settings, Database]]:
    """The settings and the database. The embedded SQLite is created on first use; others by `forq db upgrade`."""
    settings = get_settings()
    configure_logs()
    if settings.database_url is None and not (settings.home / "forq.db").exists():
        from db.upgrade import upgrade

        upgrade(settings.sqlalchemy_url)
    database = Database(settings.sqlalchemy_url)
    try:
        yield settings, database
    finally:
        database.dispose()
