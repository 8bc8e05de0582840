"""The migrated schema is the models' schema, on both databases, forwards and backwards."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from database_fixtures import BACKENDS
from sqlalchemy import inspect
from sqlalchemy.exc import IntegrityError

from db.models import Base
from db.session import Database
from db.upgrade import MIGRATIONS, current_revision, downgrade, newest_revision, upgrade

REVISIONS = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]


@pytest.fixture(params=BACKENDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without any table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'folder' / 'empty.db'}"
        return
    server = request.getfixturevalue("postgresql_server")
    url = server.new_database()
    yield url
    server.drop(url)


def tables_in(url: str) -> set[str]:
    database = Database(url)
    with database.read() as connection:
        names = set(inspect(connection).get_table_names())
    database.dispose()
    return names


def test_the_upgraded_schema_equals_the_models(database: Database) -> None:
    options: dict[str, Any] = {"compare_type": True, "compare_server_default": True, "render_as_batch": True}
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


def test_the_upgraded_checks_keys_and_cascades_equal_the_models(database: Database) -> None:
    """What autogenerate does not compare: the keys' columns and names, ON DELETE, partial indexes."""
    with database.read() as connection:
        found = inspect(connection)
        for table in Base.metadata.sorted_tables:
            primary = found.get_pk_constraint(table.name)
            assert primary["constrained_columns"] == [column.name for column in table.primary_key.columns]
            assert primary["name"] == f"pk_{table.name}"
            expected = {str(key.name): key for key in table.foreign_key_constraints}
            keys = found.get_foreign_keys(table.name)
            assert {key["name"] for key in keys} == set(expected)
            assert all(key["options"].get("ondelete") == expected[str(key["name"])].ondelete for key in keys)
            partial = {
                index["name"]
                for index in found.get_indexes(table.name)
                if index.get("dialect_options", {}).get(f"{connection.dialect.name}_where") is not None
            }
            assert partial == {
                index.name for index in table.indexes if index.dialect_options["sqlite"]["where"] is not None
            }


def test_every_constraint_and_index_follows_the_naming_convention(database: Database) -> None:
    with database.read() as connection:
        found = inspect(connection)
        names: list[tuple[str, str | None]] = []
        for table in Base.metadata.tables:
            names.append((f"pk_{table}", found.get_pk_constraint(table)["name"]))
            names += [(f"fk_{table}_", key["name"]) for key in found.get_foreign_keys(table)]
            names += [(f"uq_{table}_", key["name"]) for key in found.get_unique_constraints(table)]
            names += [(f"ck_{table}_", key["name"]) for key in found.get_check_constraints(table)]
            names += [
                (f"ix_{table}_", index["name"])
                for index in found.get_indexes(table)
                if not index.get("duplicates_constraint")
            ]
    assert len(names) > 15
    assert [(prefix, name) for prefix, name in names if name is None or not name.startswith(prefix)] == []


def test_every_downgrade_undoes_its_upgrade(empty_url: str) -> None:
    upgrade(empty_url)
    assert set(Base.metadata.tables) <= tables_in(empty_url)
    for _ in REVISIONS:
        downgrade(empty_url, "-1")
    assert tables_in(empty_url) <= {"alembic_version"}
    upgrade(empty_url)
    assert set(Base.metadata.tables) <= tables_in(empty_url)


def test_upgrading_twice_is_harmless(database_url: str, database: Database) -> None:
    assert current_revision(database) == newest_revision()
    upgrade(database_url)
    assert current_revision(database) == newest_revision()


def test_a_new_database_has_no_revision(empty_url: str) -> None:
    database = Database(empty_url)
    assert current_revision(database) is None
    database.dispose()


def test_processes_that_upgrade_at_once_all_succeed(empty_url: str) -> None:
    # They start on a byte from here, so that they collide rather than follow each other.
    code = "import sys; from db.upgrade import upgrade; print(flush=True); sys.stdin.read(1); upgrade(sys.argv[1])"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, empty_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("x")
            process.stdin.flush()
        errors = [process.communicate(timeout=60)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(errors)
    database = Database(empty_url)
    assert current_revision(database) == newest_revision()
    database.dispose()


def test_a_url_with_a_percent_sign_reaches_the_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'with%20percent.db'}"
    upgrade(url)
    assert "jobs" in tables_in(url)


JOB = (
    "INSERT INTO jobs (id, name, state, model, decoding, sampling, mapping, source, data_key, dedupe_key, priority, "
    "num_rows, num_completed, created_at) VALUES "
    "('J', 'mine', 'completed', 'm', '{}', '{{}}', '{{}}', 'cli', 'k', 'd', 0, 1, 1, '2026-01-01 00:00:00.0')"
)
BELOW_IT = (
    "INSERT INTO shards (job_id, ordinal, start_row, end_row, model, state, queue_key) "
    "VALUES ('J', 0, 0, 1, 'm', 'done', 0)",
    "INSERT INTO requests (id, job_id, row_index, state) VALUES (1, 'J', 0, 'completed')",
    "INSERT INTO outputs (request_id, sample, text, prompt_tokens, output_tokens) VALUES (1, 0, 'x', 1, 9)",
    "INSERT INTO request_stats (request_id, sample, threads, forks, max_width, steps, peak_cached_tokens, peak_blocks, "
    "attended_tokens, sequential_peak_tokens, sequential_attended_tokens, preemptions) "
    "VALUES (1, 0, 1, 0, 1, 9, 9, 1, 54, 10, 54, 0)",
)
COUNTED = ("jobs", "shards", "requests", "outputs", "request_stats")


def test_longer_decodings_fit_and_nothing_below_a_job_is_lost_on_the_way_there_and_back(empty_url: str) -> None:
    """On SQLite the jobs' table is made anew: dropping the old one must not take shards and requests with it."""
    upgrade(empty_url, "0003")
    database = Database(empty_url)

    def counts() -> list[int]:
        with database.read() as connection:
            return [connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() for table in COUNTED]

    def job() -> tuple[Any, ...]:
        with database.read() as connection:
            statement = "SELECT name, decoding, num_completed, dedupe_key FROM jobs"
            return tuple(connection.exec_driver_sql(statement).one())

    with database.write() as connection:
        for statement in (JOB.format("apar"), *BELOW_IT):
            connection.exec_driver_sql(statement)
    upgrade(empty_url)
    assert (counts(), job()) == ([1] * 5, ("mine", "apar", 1, "d"))
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE jobs SET decoding = 'apar+medusa'")
        connection.exec_driver_sql("UPDATE request_stats SET forwards = 3, hit_rate = 0.5, verify_nodes = 7")
    database.dispose()  # PostgreSQL cannot change a table that an idle session has prepared statements of
    downgrade(empty_url, "0003")
    assert (counts(), job()) == ([1] * 5, ("mine", "apar+med", 1, "d"))
    upgrade(empty_url)
    with database.read() as connection:
        assert tuple(
            connection.exec_driver_sql("SELECT forwards, hit_rate, verify_nodes, steps FROM request_stats").one()
        ) == (None, None, None, 9)
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")  # the cascade is still there
    assert counts() == [0] * 5
    database.dispose()


def test_jobs_get_a_tenant_and_lose_it_again_with_all_that_is_below_them_kept(empty_url: str) -> None:
    upgrade(empty_url, "0005")
    database = Database(empty_url)

    def ask(statement: str) -> list[tuple[Any, ...]]:
        with database.read() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

    def counts() -> list[int]:
        return [ask(f"SELECT count(*) FROM {table}")[0][0] for table in COUNTED]

    with database.write() as connection:
        for statement in (JOB.format("ar"), *BELOW_IT):
            connection.exec_driver_sql(statement)
    upgrade(empty_url)
    assert ask("SELECT tenant, name, dedupe_key FROM jobs") == [("default", "mine", "d")]
    assert counts() == [1] * 5
    with database.write() as connection:
        # Another tenant's job of the same content, and a key.
        connection.exec_driver_sql(
            JOB.format("ar").replace("('J'", "('K'").replace("(id,", "(tenant, id,").replace("('K'", "('b', 'K'")
        )
        connection.exec_driver_sql(
            "INSERT INTO api_keys (id, name, tenant, scopes, secret_sha256, created_at) "
            "VALUES ('A', 'k', 'b', '[]', 'x', '2026-01-01 00:00:00.0')"
        )
    database.dispose()
    downgrade(empty_url, "0005")
    assert ask("SELECT id, dedupe_key FROM jobs ORDER BY id") == [("J", "d"), ("K", None)]
    assert "api_keys" not in tables_in(empty_url)
    assert counts() == [2, 1, 1, 1, 1]
    with pytest.raises(IntegrityError), database.write() as connection:  # the old constraint is back
        connection.exec_driver_sql(JOB.format("ar").replace("('J'", "('L'"))
    database.dispose()
    upgrade(empty_url)
    assert ask("SELECT id, tenant FROM jobs ORDER BY id") == [("J", "default"), ("K", "default")]
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM jobs WHERE id = 'J'")  # the cascade is still there
    assert counts() == [1, 0, 0, 0, 0]
    database.dispose()


def test_answers_stored_before_trees_had_texts_get_their_one_nodes_text(empty_url: str) -> None:
    upgrade(empty_url, "0002")
    database = Database(empty_url)
    text = "caf\u00e9 \U0001f345"  # six characters, in more bytes
    with database.write() as connection:
        for statement in (
            "INSERT INTO jobs (id, state, model, decoding, sampling, mapping, source, data_key, priority, num_rows, "
            "created_at) VALUES ('J', 'completed', 'm', 'ar', '{}', '{}', 'cli', 'k', 0, 1, '2026-01-01 00:00:00.0')",
            "INSERT INTO requests (id, job_id, row_index, state) VALUES (1, 'J', 0, 'completed')",
            "INSERT INTO outputs (request_id, sample, text, prompt_tokens, output_tokens) "
            f"VALUES (1, 0, '{text}', 1, 9), (1, 1, '', 1, 1)",
            'INSERT INTO thread_nodes (request_id, sample, node, kind, thread, start, "end", first_step, last_step) '
            "VALUES (1, 0, 0, 'root', 0, 0, 9, 0, 8), (1, 1, 0, 'root', 0, 0, 1, 0, 0)",
        ):
            connection.exec_driver_sql(statement)
    upgrade(empty_url)
    with database.read() as connection:
        nodes = connection.exec_driver_sql("SELECT text_start, text_end FROM thread_nodes ORDER BY sample").all()
    assert [tuple(node) for node in nodes] == [(0, len(text)), (0, 0)]
    downgrade(empty_url, "0002")
    database.dispose()
