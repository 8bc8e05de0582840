"""A tenant may have so many jobs and rows in the queue; what is over is refused until some have ended."""

from pathlib import Path
from typing import Any

import pytest
from batches import drain, num_rows_in_tables, submit_rows, submit_table
from sqlalchemy import event, insert, select

from db.models import Job
from db.session import Database
from jobs import depth, ending
from jobs.errors import BadInput, QueueFull
from jobs.settings import Settings


def limited(settings: Settings, **limits: int) -> Settings:
    return settings.model_copy(update={"limits": settings.limits.model_copy(update=limits)})


def kept_files(settings: Settings) -> list[Path]:
    return list(settings.data_dir.glob("*"))


def test_a_job_over_the_tenants_number_of_jobs_waits_for_the_end_of_another(
    database: Database, settings: Settings
) -> None:
    settings = limited(settings, max_queued_jobs=2)
    first = submit_rows(database, settings, 2)
    submit_rows(database, settings, 3)
    before, files = num_rows_in_tables(database), kept_files(settings)
    with pytest.raises(QueueFull, match=r"^2 jobs of tenant default wait or run, and limits.max_queued_jobs is 2: "):
        submit_rows(database, settings, 4)
    assert num_rows_in_tables(database) == before
    assert kept_files(settings) == files
    ending.cancel(database, first)
    submit_rows(database, settings, 4)


def test_rows_count_until_they_are_answered(database: Database, settings: Settings) -> None:
    settings = limited(settings, max_queued_rows=10)
    submit_rows(database, settings, 6)
    with pytest.raises(
        QueueFull,
        match=r"^6 rows of tenant default wait or run and the job has 5 more, and limits.max_queued_rows is 10: ",
    ):
        submit_rows(database, settings, 5)
    submit_rows(database, settings, 4)
    drain(database)
    submit_rows(database, settings, 10)


def test_rows_that_were_refused_do_not_wait(database: Database, settings: Settings) -> None:
    settings = limited(settings, max_queued_rows=2)
    submitted = submit_table(database, settings, {"prompt": ["a", None, None, "b"]})
    assert submitted.num_refused == 2


def test_a_job_that_could_never_wait_is_refused_for_good(database: Database, settings: Settings) -> None:
    with pytest.raises(
        BadInput, match=r"^the job has 11 rows to answer, and limits.max_queued_rows lets 10 wait at once"
    ):
        submit_rows(database, limited(settings, max_queued_rows=10), 11)
    assert num_rows_in_tables(database)["jobs"] == 0
    assert kept_files(settings) == []


def test_tenants_do_not_fill_each_others_queues(database: Database, settings: Settings) -> None:
    settings = limited(settings, max_queued_jobs=1, max_queued_rows=3)
    submit_rows(database, settings, 3, tenant="red")
    submit_rows(database, settings, 3, tenant="blue")
    with pytest.raises(QueueFull, match="tenant red"):
        submit_rows(database, settings, 1, tenant="red")


def test_a_full_queue_does_not_hide_that_a_file_is_a_job_already(database: Database, settings: Settings) -> None:
    settings = limited(settings, max_queued_jobs=1)
    first = submit_table(database, settings, {"prompt": ["a"]}, dedupe=True)
    again = submit_table(database, settings, {"prompt": ["a"]}, dedupe=True)
    assert (again.job_id, again.is_new) == (first.job_id, False)
    with pytest.raises(QueueFull):
        submit_table(database, settings, {"prompt": ["b"]}, dedupe=True)
    with database.read() as connection:
        assert connection.execute(select(Job.id)).scalars().all() == [first.job_id]


def test_what_a_tenant_had_in_the_past_is_not_read_for_what_it_has_now(database: Database, settings: Settings) -> None:
    submit_rows(database, settings, 8)
    with database.write() as connection:
        job = connection.execute(select(Job.__table__)).one()._asdict()
        ended = ({**job, "id": f"{number:026}", "state": "completed"} for number in range(2000))
        connection.execute(insert(Job.__table__), list(ended))
        connection.exec_driver_sql("ANALYZE")
    seen: list[tuple[str, Any]] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: seen.append((args[2], args[3])))
    depth.check(database, settings.limits, "default", 1)
    with database.write() as connection:
        depth.claim(connection, settings.limits, "default", 1, "another")
    queries = [(text, values) for text, values in seen if "FROM jobs" in text or "FROM shards" in text]
    assert len(queries) == 4
    explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
    for query, values in queries:
        with database.read() as connection:
            plan = str(connection.exec_driver_sql(f"{explain} {query}", values).all())
        assert "ix_jobs_open" in plan, plan
        if database.is_sqlite:  # PostgreSQL rightly scans a table of two shards
            assert "shards" not in query or "ix_shards_open" in plan, plan
