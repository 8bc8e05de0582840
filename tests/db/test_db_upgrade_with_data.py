"""A database of the first revision, with data in every table and column, upgraded to today's: nothing is lost."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from database_fixtures import BACKENDS
from sqlalchemy import MetaData, Table, insert, select
from sqlalchemy.types import JSON, DateTime, Float, Integer

from db.session import Database
from db.upgrade import current_revision, newest_revision, upgrade

MOMENT = datetime(2026, 5, 17, 12, 30, 15, 250_000, UTC)
KEYS = {"job_id": "J", "request_id": 1}
"""What refers to another table's only row."""


@pytest.fixture(params=BACKENDS)
def first_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database at the first revision."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'first.db'}"
        upgrade(url, "0001")
        yield url
        return
    server = request.getfixturevalue("postgresql_server")
    url = server.new_database()
    upgrade(url, "0001")
    yield url
    server.drop(url)


def reflected(database: Database) -> dict[str, Table]:
    metadata = MetaData()
    metadata.reflect(database.engine)
    return {table.name: table for table in metadata.sorted_tables if table.name != "alembic_version"}


def value_of(column: Any) -> Any:
    if column.name in KEYS:
        return KEYS[column.name]
    if column.primary_key:
        return 1 if isinstance(column.type, Integer) else "J"
    if column.name == "decoding":
        return "apar"
    if column.name == "state":
        return "completed"
    if isinstance(column.type, JSON):
        return {"temperature": 0.5, "stop": ["é"]}
    if isinstance(column.type, DateTime):
        return MOMENT
    if isinstance(column.type, Float):
        return 0.25
    if isinstance(column.type, Integer):
        return 3
    return "é\n'\"" if column.type.length is None else "é'\""[: column.type.length]


def test_every_value_of_the_first_revision_survives(first_url: str) -> None:
    database = Database(first_url)
    before: dict[str, dict[str, Any]] = {}
    with database.write() as connection:
        for name, table in reflected(database).items():
            before[name] = {column.name: value_of(column) for column in table.columns}
            connection.execute(insert(table).values(before[name]))
    database.dispose()

    upgrade(first_url)
    assert current_revision(database) == newest_revision()
    tables = reflected(database)
    assert set(tables) >= set(before)
    with database.read() as connection:
        for name, values in before.items():
            table = tables[name]
            kept = connection.execute(select(*(table.c[column] for column in values))).mappings().one()
            for column, value in values.items():
                found = kept[column]
                if isinstance(found, datetime):
                    found = found.replace(tzinfo=found.tzinfo or UTC)
                assert found == value, (name, column)
    database.dispose()
