"""Leases: timed, fenced ownership of shards. SQL alone decides who owns what; messages only ring.

No transaction here holds a shard and waits for its job; `cancel` and `retry` (jobs/ending.py) take the job first and
then its shards. So there is no cycle of locks.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, literal, select, update

from db.clock import db_now
from db.models import Job, Shard
from db.session import Database
from db.states import JobState, ShardState
from jobs.ending import cancel_released_shards, settle_job, stalled_jobs
from jobs.errors import LeaseLost
from jobs.webhooks.events import announce


@dataclass(frozen=True, slots=True)
class Lease:
    """A shard in one worker's hands. `token` must accompany every write."""

    shard_id: int
    job_id: str
    owner: str
    token: int
    start_row: int
    end_row: int
    attempts: int
    """Earlier leases of this shard that ended with the worker's death."""
    kv_share: float = 1.0
    """The part of a KV budget that the shard's job may hold while other jobs wait."""

    def __str__(self) -> str:
        return f"job {self.job_id} rows {self.start_row}-{self.end_row - 1} token {self.token}"


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a heartbeat learned."""

    held: frozenset[tuple[int, int]]
    """(shard id, token) of every lease still owned."""
    cancelled_jobs: frozenset[str]


def acquire(
    database: Database, model: str, owner: str, lease_s: float, *, passing_over: Collection[str] = ()
) -> Lease | None:
    """Take the next free shard of a model, of a job that is not passed over; None when there is none."""
    candidate = (
        select(Shard.id)
        .where(Shard.model == model, Shard.state == ShardState.QUEUED, *_of_other_jobs(passing_over))
        .order_by(Shard.queue_key, Shard.id)
        .limit(1)
        .with_for_update(skip_locked=True)  # nothing on SQLite, whose writers exclude each other
    )
    statement = (
        update(Shard)
        .where(Shard.id == candidate.scalar_subquery(), Shard.state == ShardState.QUEUED)
        .values(
            state=ShardState.LEASED,
            lease_owner=owner,
            lease_token=Shard.lease_token + 1,
            lease_expires_at=db_now(literal(lease_s)),
        )
        .returning(Shard.id, Shard.job_id, Shard.lease_token, Shard.start_row, Shard.end_row, Shard.attempts)
    )
    with database.write() as connection:
        row = connection.execute(statement).one_or_none()
    if row is None:
        return None
    waiting = select(Job.id).where(Job.id == row.job_id, Job.state == JobState.QUEUED)
    with database.write() as connection:
        # Passed over where it is locked: whoever holds it says so itself, or ends the job. A worker that was stopped
        # just there would stop the leasing of every other one.
        started = connection.execute(
            update(Job)
            .where(Job.id.in_(waiting.with_for_update(skip_locked=True)), Job.state == JobState.QUEUED)
            .values(state=JobState.RUNNING, started_at=db_now())
        )
        if started.rowcount == 1:
            announce(connection, row.job_id, JobState.RUNNING)
        kv_share = connection.execute(select(Job.kv_share).where(Job.id == row.job_id)).scalar_one()
    share = 1.0 if kv_share is None else kv_share
    return Lease(row.id, row.job_id, owner, row.lease_token, row.start_row, row.end_row, row.attempts, share)


def _of_other_jobs(job_ids: Collection[str]) -> list[Any]:
    return [Shard.job_id.not_in(sorted(job_ids))] if job_ids else []


def has_queued(database: Database, model: str) -> bool:
    statement = select(Shard.id).where(Shard.model == model, Shard.state == ShardState.QUEUED).limit(1)
    with database.read() as connection:
        return connection.execute(statement).first() is not None


def renew(database: Database, owner: str, lease_s: float) -> Renewal:
    """Prolong every lease of a worker, and learn which it has lost and which jobs were cancelled."""
    with database.write() as connection:
        rows = connection.execute(
            update(Shard)
            .where(Shard.lease_owner == owner, Shard.state == ShardState.LEASED)
            .values(lease_expires_at=db_now(literal(lease_s)))
            .returning(Shard.id, Shard.lease_token, Shard.job_id)
        ).all()
        jobs = {row.job_id for row in rows}
        cancelled = (
            connection.scalars(select(Job.id).where(Job.id.in_(jobs), Job.state == JobState.CANCELLING)).all()
            if jobs
            else []
        )
    return Renewal(frozenset((row.id, row.lease_token) for row in rows), frozenset(cancelled))


def fenced(lease: Lease) -> Any:
    """The WHERE clause that lets only the current owner of a lease write."""
    return (
        (Shard.id == lease.shard_id)
        & (Shard.lease_token == lease.token)
        & (Shard.lease_owner == lease.owner)
        & (Shard.state == ShardState.LEASED)
    )


def release(database: Database, lease: Lease, *, crashed: bool = False) -> bool:
    """Give a shard back unfinished; False if it was lost already. `crashed` counts as a death in its attempts."""
    with database.write() as connection:
        result = connection.execute(
            update(Shard)
            .where(fenced(lease))
            .values(
                state=ShardState.QUEUED,
                lease_owner=None,
                lease_expires_at=None,
                attempts=Shard.attempts + int(crashed),
            )
        )
    return result.rowcount == 1


def release_stranger(database: Database, owner: str, shard_id: int, token: int) -> None:
    """Give back a lease of which the worker knows no more than the heartbeat says."""
    with database.write() as connection:
        _requeue(
            connection,
            (Shard.id == shard_id) & (Shard.lease_token == token) & (Shard.lease_owner == owner),
            crashed=False,
        )


def release_all(database: Database, owner: str, *, crashed: bool) -> int:
    """Give back everything a worker held, when it is known to be gone. Returns the number of shards."""
    with database.write() as connection:
        return _requeue(connection, Shard.lease_owner == owner, crashed=crashed)


def finish(database: Database, lease: Lease) -> None:
    """End a shard whose rows have all ended, and the job if that was its last one.

    Raises:
        LeaseLost: the lease is another's now.
    """
    with database.write() as connection:
        result = connection.execute(
            update(Shard)
            .where(fenced(lease))
            .where(Shard.num_completed + Shard.num_failed + Shard.num_cancelled == Shard.end_row - Shard.start_row)
            .values(state=ShardState.DONE, lease_owner=None, lease_expires_at=None)
        )
        if result.rowcount != 1:
            raise LeaseLost(f"{lease}: lost, or rows are missing")
    settle_job(database, lease.job_id)


def abandon(database: Database, lease: Lease) -> None:
    """End a shard whose job was cancelled: its finished rows stay, the others end as cancelled.

    Raises:
        LeaseLost: the lease is another's now.
    """
    if not release(database, lease):
        raise LeaseLost(f"{lease}: lost")
    # Released first, then cancelled like any queued shard, job before shards: see the order of locks above.
    cancel_released_shards(database, lease.job_id)
    settle_job(database, lease.job_id)


def sweep(database: Database) -> int:
    """Return expired leases to the queue, and end jobs that have nothing left to do. Returns the leases reaped.

    Any number of processes may sweep at once: each statement decides and acts in one. What another transaction holds
    locked is passed over until the next sweep: its worker may have been stopped in the middle of a write, and whoever
    waited for it would not renew its own leases meanwhile.
    """
    expired = Shard.lease_expires_at < db_now()
    unlocked = select(Shard.id).where(Shard.state == ShardState.LEASED, expired).with_for_update(skip_locked=True)
    with database.write() as connection:
        num_reaped = _requeue(connection, expired & Shard.id.in_(unlocked), crashed=True)
    for job_id, state in stalled_jobs(database):
        if state == JobState.CANCELLING:
            cancel_released_shards(database, job_id)
        settle_job(database, job_id)
    return num_reaped


def _requeue(connection: Connection, which: Any, *, crashed: bool) -> int:
    result = connection.execute(
        update(Shard)
        .where(which, Shard.state == ShardState.LEASED)
        .values(
            state=ShardState.QUEUED, lease_owner=None, lease_expires_at=None, attempts=Shard.attempts + int(crashed)
        )
    )
    return int(result.rowcount)
