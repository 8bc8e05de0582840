"""How much one tenant may have in the queue: `limits.max_queued_jobs` and `limits.max_queued_rows`.

What counts are jobs that have not ended, and of them the rows that have not. `forq retry` is not held up: its rows were
let in once.
"""

from sqlalchemy import Connection, func, literal_column, select

from db import locks
from db.models import Job, Shard
from db.session import Database
from db.states import JobState, ShardState
from jobs.errors import BadInput, QueueFull
from jobs.settings import Limits

# Written out, not bound: a planner that does not know the values cannot use the partial indexes `ix_jobs_open` and
# `ix_shards_open`, and SQLite's wants them in the order of the index.
_JOB_IS_OPEN = Job.state.in_(
    [literal_column(f"'{state}'") for state in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING)]
)
_SHARD_IS_OPEN = Shard.state.in_([literal_column(f"'{state}'") for state in (ShardState.QUEUED, ShardState.LEASED)])


def check(database: Database, limits: Limits, tenant: str, num_rows: int) -> None:
    """Whether a job of so many rows fits now: a look that spares reading or keeping a file in vain.

    Raises:
        BadInput: it never will.
        QueueFull: not now.
    """
    _check_alone(limits, num_rows)
    with database.read() as connection:
        _check_beside_others(connection, limits, tenant, num_rows)


def claim(connection: Connection, limits: Limits, tenant: str, num_rows: int, job_id: str) -> None:
    """The same within the transaction that stores job `job_id`: until its end, no other submit of the tenant counts.

    Raises:
        BadInput, QueueFull: as `check`.
    """
    _check_alone(limits, num_rows)
    locks.hold(connection, "depth", tenant)
    _check_beside_others(connection, limits, tenant, num_rows, job_id)


def _check_alone(limits: Limits, num_rows: int) -> None:
    if num_rows > limits.max_queued_rows:
        raise BadInput(
            f"the job has {num_rows} rows to answer, and limits.max_queued_rows lets {limits.max_queued_rows} wait at "
            "once: split the file, or raise the limit"
        )


def _check_beside_others(connection: Connection, limits: Limits, tenant: str, num_rows: int, job_id: str = "") -> None:
    is_queued = (Job.tenant == tenant) & _JOB_IS_OPEN & (Job.id != job_id)
    num_jobs = connection.execute(select(func.count()).select_from(Job).where(is_queued)).scalar_one()
    if num_jobs >= limits.max_queued_jobs:
        raise QueueFull(
            f"{num_jobs} jobs of tenant {tenant} wait or run, and limits.max_queued_jobs is {limits.max_queued_jobs}: "
            "submit it when some have ended, or raise the limit"
        )
    unended = Shard.end_row - Shard.start_row - Shard.num_completed - Shard.num_failed - Shard.num_cancelled
    statement = select(func.coalesce(func.sum(unended), 0)).join(Job, Job.id == Shard.job_id)
    num_waiting = int(connection.execute(statement.where(is_queued, _SHARD_IS_OPEN)).scalar_one())
    if num_waiting + num_rows > limits.max_queued_rows:
        raise QueueFull(
            f"{num_waiting} rows of tenant {tenant} wait or run and the job has {num_rows} more, and "
            f"limits.max_queued_rows is {limits.max_queued_rows}: submit it when some are answered, or raise the limit"
        )
