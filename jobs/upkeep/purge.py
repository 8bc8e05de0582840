"""Retention: deletes jobs that ended long ago, then what only they needed.

A job goes in one transaction that holds its row from the beginning, as `cancel` and `retry` do (jobs/ending.py), and
touches its shards afterwards: job first, then its shards. So a `retry` at the same moment either comes first, and the
job is not an ended one any more when the lock is had; or comes second, and finds no job. An ended job has no leased
shard, so no worker holds what is deleted here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from sqlalchemy import ColumnElement, and_, delete, exists, func, literal, select

from db.clock import db_now
from db.models import Batch, Job, Output, Request, RequestStats, Shard, ThreadNode, Worker
from db.session import Database
from db.states import ENDED, OPEN_BATCHES, ShardState
from jobs import openai_files
from jobs.errors import Conflict, NotFound
from jobs.messages import storable
from jobs.settings import Settings
from jobs.upkeep import leftovers, old_batches
from jobs.upkeep.leftovers import Left
from jobs.webhooks.retention import purge_events

ROWS_PER_STATEMENT = 16_384
"""Progress moves, and a statement's list of rows stays small; all statements of a job are one transaction."""
SILENT_WORKER_S = 24 * 3600.0
"""A worker that never said that it exits counts as gone after this long without a heartbeat."""

Progress = Callable[[str, int, int], None]

log = structlog.get_logger()


@dataclass
class Purged:
    """What was deleted, or with `dry_run` would be."""

    dry_run: bool
    jobs: int = 0
    rows: int = 0
    answers: int = 0
    workers: int = 0
    files: int = 0
    file_bytes: int = 0
    batches: int = 0
    """Of the OpenAI-compatible API, with their output and error files."""
    temporaries: int = 0
    temporary_bytes: int = 0
    webhook_events: int = 0
    skipped: int = 0
    """Jobs that were chosen, and then retried, or purged by another, before their turn."""


def purge(
    database: Database,
    settings: Settings,
    older_than_s: float,
    job_ids: Sequence[str] = (),
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Purged:
    """Delete the jobs that ended more than `older_than_s` ago, all or those named; then what nothing names any more.

    Raises:
        NotFound: a named job does not exist; nothing was deleted.
        Conflict: a named job has not ended, or not long enough ago; nothing was deleted.
    """
    for job_id in job_ids:
        _check(database, job_id, older_than_s)
    done = Purged(dry_run)
    old = _is_old(older_than_s)
    if job_ids:
        old &= Job.id.in_(list(job_ids))
    done.webhook_events = purge_events(database, older_than_s, dry_run=dry_run)  # the rest go with their jobs
    old_batches.purge(database, older_than_s, job_ids, done)
    if dry_run:
        _count(database, old, done)
    else:
        _purge_jobs(database, old, older_than_s, done, progress or (lambda phase, done, total: None))
    _purge_workers(database, older_than_s, done)
    _purge_files(database, settings, old, done)
    return done


def purge_job(
    database: Database, job_id: str, older_than_s: float, report: Callable[[int], None] = lambda num_rows: None
) -> tuple[int, int] | None:
    """Delete one job with all that belongs to it, in one transaction; `report` hears of the rows done so far.

    Returns the number of its rows and answers; None where it is no old, ended job (any more).
    """
    with database.write() as connection:
        # On PostgreSQL a row that another transaction holds is waited for, and then judged as that one left it.
        job = connection.execute(
            select(Job.num_rows).where(Job.id == job_id, _is_old(older_than_s)).with_for_update()
        ).one_or_none()
        if job is None:
            return None
        num_rows = num_answers = 0
        for start in range(0, job.num_rows, ROWS_PER_STATEMENT):
            mine = and_(
                Request.job_id == job_id, Request.row_index >= start, Request.row_index < start + ROWS_PER_STATEMENT
            )
            ids = select(Request.id).where(mine)
            # Children first, many at once: left to the foreign keys they would go one by one.
            connection.execute(delete(ThreadNode).where(ThreadNode.request_id.in_(ids)))
            connection.execute(delete(RequestStats).where(RequestStats.request_id.in_(ids)))
            num_answers += connection.execute(delete(Output).where(Output.request_id.in_(ids))).rowcount
            num_rows += connection.execute(delete(Request).where(mine)).rowcount
            report(num_rows)
        connection.execute(delete(Shard).where(Shard.job_id == job_id))
        connection.execute(delete(Job).where(Job.id == job_id))
    return num_rows, num_answers


def _is_old(older_than_s: float) -> ColumnElement[bool]:
    is_needed = exists().where(Batch.job_id == Job.id, Batch.state.in_(OPEN_BATCHES))  # for its output
    return Job.state.in_(ENDED) & (Job.finished_at < db_now(literal(-older_than_s))) & ~is_needed


def _check(database: Database, job_id: str, older_than_s: float) -> None:
    statement = select(Job.state, Job.finished_at, _is_old(older_than_s).label("is_old"))
    with database.read() as connection:
        job = connection.execute(statement.where(Job.id == storable(job_id))).one_or_none()
    if job is None:
        raise NotFound(f"no job {job_id}: `forq list` shows those there are")
    if job.state not in ENDED:
        raise Conflict(f"job {job_id} is {job.state}: wait for its end, or cancel it, before a purge")
    if old_batches.is_needed(database, job_id):
        raise Conflict(f"job {job_id} is a batch's whose output is still to be written: `forq api` does that")
    if not job.is_old:
        raise Conflict(f"job {job_id} ended at {job.finished_at:%Y-%m-%d %H:%M:%S} UTC: give a smaller --older-than")


def _count(database: Database, old: ColumnElement[bool], done: Purged) -> None:
    answers = select(func.count()).select_from(Output).join(Request, Request.id == Output.request_id)
    with database.read() as connection:
        done.jobs, done.rows = connection.execute(
            select(func.count(), func.coalesce(func.sum(Job.num_rows), 0)).where(old)
        ).one()
        done.rows = int(done.rows)  # PostgreSQL adds up to a Decimal
        done.answers = connection.execute(answers.join(Job, Job.id == Request.job_id).where(old)).scalar_one()


def _purge_jobs(
    database: Database, old: ColumnElement[bool], older_than_s: float, done: Purged, progress: Progress
) -> None:
    with database.read() as connection:
        jobs = connection.execute(select(Job.id, Job.num_rows).where(old).order_by(Job.id)).all()
    total, passed = sum(job.num_rows for job in jobs), 0
    for job in jobs:
        deleted = purge_job(database, job.id, older_than_s, partial(_report_rows, progress, passed, total))
        passed += job.num_rows
        if deleted is None:
            done.skipped += 1
        else:
            done.jobs += 1
            done.rows += deleted[0]
            done.answers += deleted[1]
            log.info("job_purged", job_id=job.id, rows=deleted[0])


def _report_rows(progress: Progress, before: int, total: int, num_rows: int) -> None:
    progress("rows", before + num_rows, total)


def _purge_workers(database: Database, older_than_s: float, done: Purged) -> None:
    """Forget workers that ended before the limit; one that may still come back for its leases is none of them."""
    holds = exists().where(Shard.lease_owner == Worker.id, Shard.state == ShardState.LEASED)
    silent = db_now(literal(-max(older_than_s, SILENT_WORKER_S)))
    gone = (Worker.exited_at < db_now(literal(-older_than_s))) | (
        Worker.exited_at.is_(None) & (Worker.heartbeat_at < silent)
    )
    if done.dry_run:
        with database.read() as connection:
            done.workers = connection.execute(select(func.count()).select_from(Worker).where(gone, ~holds)).scalar_one()
        return
    with database.write() as connection:
        done.workers = connection.execute(delete(Worker).where(gone, ~holds)).rowcount


def _purge_files(database: Database, settings: Settings, old: ColumnElement[bool], done: Purged) -> None:
    stays = Job.id.not_in(select(Job.id).where(old)) if done.dry_run else None
    unnamed = leftovers.unnamed_files(database, settings, stays, even_without_jobs=done.jobs > 0)
    done.files, done.file_bytes = _remove(unnamed, leftovers.remove_unnamed, done.dry_run)
    for left in openai_files.reclaim(database, settings, dry_run=done.dry_run):
        done.files, done.file_bytes = done.files + 1, done.file_bytes + left.num_bytes
    temporaries = leftovers.dead_temporaries(settings)
    done.temporaries, done.temporary_bytes = _remove(temporaries, leftovers.remove_temporary, done.dry_run)


def _remove(found: Iterator[Left], remove: Callable[[Left], bool], dry_run: bool) -> tuple[int, int]:
    removed = [left.num_bytes for left in found if dry_run or remove(left)]
    return len(removed), sum(removed)
