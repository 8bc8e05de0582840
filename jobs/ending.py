"""How jobs end: the last shard, cancellation, failure; and how `retry` opens them again."""

from typing import Any

from sqlalchemy import Connection, Row, exists, func, literal_column, select, update

from db.clock import db_now
from db.models import Job, Request, Shard
from db.session import Database
from db.states import ENDED, JobState, RequestState, ShardState, sources_of
from jobs.errors import Conflict, NotFound
from jobs.messages import storable, storable_error
from jobs.webhooks.events import announce

_OPEN = (ShardState.QUEUED, ShardState.LEASED)
# Written out, not bound: a planner that does not know the values cannot use the partial index `ix_shards_open`.
_IS_OPEN = Shard.state.in_([literal_column(f"'{state}'") for state in _OPEN])


def totals(connection: Connection, job_id: str) -> Row[*tuple[Any, ...]]:
    """The shards' counters, added up: num_completed, num_failed, num_cancelled, output_tokens."""
    columns = (Shard.num_completed, Shard.num_failed, Shard.num_cancelled, Shard.output_tokens)
    sums = [func.coalesce(func.sum(column), 0).label(column.key) for column in columns]
    return connection.execute(select(*sums).where(Shard.job_id == job_id)).one()


def settle_job(database: Database, job_id: str) -> None:
    """End a job whose shards have all ended; does nothing while one is open.

    The cheap look comes first: it runs after every shard, and the job's lock is only worth taking at the end.
    """
    with database.read() as connection:
        if _has_open_shards(connection, job_id):
            return
    with database.write() as connection:
        job = _lock(connection, job_id)
        # Looked at again under the lock: of two workers that end the last two shards, the later one sees both ended.
        if job.state in ENDED or _has_open_shards(connection, job_id):
            return
        if job.state == JobState.QUEUED:
            # Its last shard was leased and ended by a worker that died, or lost the database, before it could say so.
            connection.execute(update(Job).where(Job.id == job_id).values(state=JobState.RUNNING, started_at=db_now()))
            announce(connection, job_id, JobState.RUNNING)
        target = JobState.CANCELLED if job.state == JobState.CANCELLING else JobState.COMPLETED
        _end(connection, job_id, target)


def stalled_jobs(database: Database) -> list[tuple[str, str]]:
    """Id and state of the jobs that a sweep may have to end: those with no open shard, and those being cancelled.

    Without those that another transaction holds locked: see `leases.sweep`.
    """
    open_shard = exists().where(Shard.job_id == Job.id, _IS_OPEN)
    statement = select(Job.id, Job.state).where(
        (Job.state == JobState.CANCELLING) | (Job.state.in_((JobState.QUEUED, JobState.RUNNING)) & ~open_shard)
    )
    statement = statement.with_for_update(skip_locked=True)  # locked for a moment only: whoever ends one locks it anew
    with database.read() as connection:
        return [(row.id, row.state) for row in connection.execute(statement)]


def cancel(database: Database, job_id: str) -> str:
    """Stop a job: finished rows stay, waiting ones end as cancelled, running ones are let go by their workers.

    Returns the state it is in then: `cancelling`, or `cancelled` when nothing was running.

    Raises:
        NotFound: no such job.
        Conflict: it has ended already.
    """
    with database.write() as connection:
        job = _lock(connection, job_id)
        if job.state in ENDED:
            raise Conflict(f"job {job_id} is {job.state} already: nothing to cancel")
        connection.execute(
            update(Job)
            .where(Job.id == job_id, Job.state.in_(sources_of(JobState.CANCELLING)))
            .values(state=JobState.CANCELLING)
        )
        cancel_queued_shards(connection, job_id)
    settle_job(database, job_id)
    with database.read() as connection:
        return connection.execute(select(Job.state).where(Job.id == job_id)).scalar_one()


def cancel_queued_shards(connection: Connection, job_id: str) -> None:
    """End every queued shard of a cancelled job, and their unfinished rows."""
    rows = connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.state == ShardState.QUEUED)
        .values(
            state=ShardState.CANCELLED,
            num_cancelled=Shard.end_row - Shard.start_row - Shard.num_completed - Shard.num_failed,
        )
        .returning(Shard.start_row, Shard.end_row)
    ).all()
    for start, end in _merge([(row.start_row, row.end_row) for row in rows]):
        _set_rows(connection, job_id, start, end, RequestState.QUEUED, state=RequestState.CANCELLED)


def cancel_released_shards(database: Database, job_id: str) -> None:
    """End the shards that came back to the queue of a job that is being cancelled; nothing for any other job.

    Under the job's lock: without it a `retry` could come between the look and the update, and lose its rows.
    """
    with database.write() as connection:
        if _lock(connection, job_id).state == JobState.CANCELLING:
            cancel_queued_shards(connection, job_id)


def retry(database: Database, job_id: str) -> int:
    """Queue a job's failed rows again; all others stay as they are. Returns the number of rows.

    Raises:
        NotFound: no such job.
        Conflict: it has not ended, or no row failed.
    """
    with database.write() as connection:
        job = _lock(connection, job_id)
        if job.state not in ENDED:
            raise Conflict(f"job {job_id} is {job.state}: wait for its end, or cancel it, before a retry")
        rows = connection.execute(
            select(Shard.id, Shard.start_row, Shard.end_row, Shard.num_failed).where(
                Shard.job_id == job_id, Shard.num_failed > 0
            )
        ).all()
        # A row refused at submit has no payload: no retry can help it, it must be submitted again, mended.
        retryable = (Request.job_id == job_id) & (Request.state == RequestState.FAILED) & Request.payload.is_not(None)
        num_rows = 0
        for shard in rows:
            changed = connection.execute(
                update(Request)
                .where(retryable, Request.row_index >= shard.start_row, Request.row_index < shard.end_row)
                .values(state=RequestState.QUEUED, error_code=None, error=None, attempts=0)
            ).rowcount
            if changed:
                connection.execute(
                    update(Shard)
                    .where(Shard.id == shard.id)
                    .values(
                        state=ShardState.QUEUED,
                        num_failed=Shard.num_failed - changed,
                        attempts=0,
                        lease_owner=None,
                        lease_expires_at=None,
                    )
                )
            num_rows += changed
        if num_rows == 0:
            raise Conflict(
                f"job {job_id} has no failed row that could be asked again; "
                "mend rows that were refused at submit, and submit them anew"
            )
        connection.execute(
            update(Job)
            .where(Job.id == job_id, Job.state.in_(sources_of(JobState.QUEUED)))
            .values(state=JobState.QUEUED, started_at=None, finished_at=None, error=None)
        )
    return num_rows


def fail_job(database: Database, job_id: str, error: str) -> None:
    """End a job that could not run at all; its unfinished rows fail with the same reason, so `retry` can ask them."""
    error = storable_error(error)
    with database.write() as connection:
        job = _lock(connection, job_id)
        if job.state not in sources_of(JobState.FAILED):
            return
        rows = connection.execute(
            update(Shard)
            .where(Shard.job_id == job_id, _IS_OPEN)
            .values(
                state=ShardState.DONE,
                lease_owner=None,
                lease_expires_at=None,
                num_failed=Shard.end_row - Shard.start_row - Shard.num_completed - Shard.num_cancelled,
            )
            .returning(Shard.start_row, Shard.end_row)
        ).all()
        values = {"state": RequestState.FAILED, "error_code": "job_failed", "error": error}
        for start, end in _merge([(row.start_row, row.end_row) for row in rows]):
            _set_rows(connection, job_id, start, end, RequestState.QUEUED, **values)
        _end(connection, job_id, JobState.FAILED, error)


def _end(connection: Connection, job_id: str, target: JobState, error: str | None = None) -> None:
    sums = totals(connection, job_id)
    ended = connection.execute(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(sources_of(target)))
        .values(state=target, finished_at=db_now(), error=error, **sums._mapping)
    )
    if ended.rowcount == 1:
        announce(connection, job_id, target)


def _lock(connection: Connection, job_id: str) -> Row[*tuple[Any, ...]]:
    job = connection.execute(
        select(Job.id, Job.state).where(Job.id == storable(job_id)).with_for_update()
    ).one_or_none()
    if job is None:
        raise NotFound(f"no job {job_id}: `forq list` shows those there are")
    return job


def _has_open_shards(connection: Connection, job_id: str) -> bool:
    statement = select(Shard.id).where(Shard.job_id == job_id, _IS_OPEN).limit(1)
    return connection.execute(statement).first() is not None


def _set_rows(connection: Connection, job_id: str, start: int, end: int, now: RequestState, **values: Any) -> None:
    connection.execute(
        update(Request)
        .where(Request.job_id == job_id, Request.row_index >= start, Request.row_index < end, Request.state == now)
        .values(**values)
    )


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join touching half-open ranges: a cancelled job is then a few statements, not one per shard."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
