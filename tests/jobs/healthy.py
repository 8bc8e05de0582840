"""A database with a job in every state, as the service leaves it; and things made old."""

import os
import time
from pathlib import Path

import pyarrow as pa
from batches import acquire, drain, failed, run_shard, sample, submit_rows, submit_table
from receiver import allowing
from sqlalchemy import text

from db.session import Database
from jobs import ending, results
from jobs.settings import Settings
from jobs.webhooks import registry

HOURS = 3600.0


def answered_with_trees(row: results.PendingRow) -> results.RowResult:
    """Every row but those that ask for failure, with nodes that cover the answer."""
    if "7" in row.payload["prompt"]:
        return failed(row)
    number = row.sampling.n or 1
    return results.RowResult(row.request_id, tuple(sample(f"answer {i}", num_nodes=2) for i in range(number)))


def ended_job(database: Database, settings: Settings, num_rows: int = 9) -> str:
    """A completed job; its row 7 has failed where there is one."""
    job_id = submit_rows(database, settings, num_rows)
    drain(database, answered_with_trees)
    return job_id


def fill(database: Database, settings: Settings) -> dict[str, str]:
    """Job ids by state. A webhook hears of them all."""
    registry.add(database, allowing(settings, "https://hooks.example.com/"), "https://hooks.example.com/")
    jobs = {"completed": ended_job(database, settings)}
    own = pa.array([{"n": 3}, None], pa.struct([("n", pa.int64())]))
    jobs["samples"] = submit_table(
        database, settings, {"prompt": ["one", "two"], "sampling": own}, sampling={"n": 2}
    ).job_id
    jobs["refused"] = submit_table(database, settings, {"prompt": ["one", None]}).job_id
    drain(database, answered_with_trees)
    jobs["cancelled"] = submit_rows(database, settings, 9)
    run_shard(database, acquire(database), answered_with_trees)
    ending.cancel(database, jobs["cancelled"])
    jobs["failed"] = submit_rows(database, settings, 5)
    ending.fail_job(database, jobs["failed"], "no model")
    jobs["running"] = submit_rows(database, settings, 9)
    run_shard(database, acquire(database), answered_with_trees)
    acquire(database)
    jobs["cancelling"] = submit_rows(database, settings, 5, model="other")
    acquire(database, model="other")
    ending.cancel(database, jobs["cancelling"])
    jobs["queued"] = submit_rows(database, settings, 5)
    return jobs


def age(database: Database, *job_ids: str) -> None:
    """As if these jobs had ended in 2001."""
    with database.write() as connection:
        for job_id in job_ids:
            connection.execute(
                text("UPDATE jobs SET finished_at = '2001-01-01 00:00:00.000000' WHERE id = :id"), {"id": job_id}
            )


def age_file(path: Path, hours: float = 2) -> Path:
    then = time.time() - hours * HOURS
    os.utime(path, (then, then))
    return path


def add_worker(database: Database, worker_id: str, *, heartbeat: str = "now", exited: str | None = None) -> None:
    """`now`, or a moment in 2001."""
    moment = {"now": "CURRENT_TIMESTAMP", "2001": "'2001-01-01 00:00:00.000000'", None: "NULL"}
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO workers (id, model, host, pid, state, started_at, heartbeat_at, exited_at) VALUES "
            f"('{worker_id}', 'm', 'here', 1, 'ready', '2001-01-01 00:00:00.000000', {moment[heartbeat]}, "
            f"{moment[exited]})"
        )
