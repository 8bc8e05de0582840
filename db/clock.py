"""The database's own clock as SQL, so that machines with different clocks agree on leases."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC, always timezone-aware in Python; SQLite, which has no time zones, stores it as UTC text."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class db_now(GenericFunction[datetime]):
    """`db_now()` or `db_now(offset_s)`: the statement's moment on the database's clock, plus an offset in seconds."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    # Six digits of fraction, as SQLAlchemy stores them: texts of one length compare like the moments they name.
    offset = compiler.process(element.clauses, **kw)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now'{f', {offset} || ' + repr(' seconds') if offset else ''})"


@compiles(db_now, "postgresql")
def _postgresql_now(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    # clock_timestamp(), not now(): a lease must not start when a long transaction began.
    offset = compiler.process(element.clauses, **kw)
    return f"(clock_timestamp() + make_interval(secs => {offset}))" if offset else "clock_timestamp()"


def plain(value: Any) -> Any:
    """A value for JSON: a moment as RFC 3339 in UTC, ending in `Z`; anything else as it is."""
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
