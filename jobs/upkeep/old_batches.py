"""Retention of the OpenAI-compatible API's batches: they go with their jobs, and their output with them.

Uploads stay until their owner deletes them, or they expire.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import delete, func, literal, select, update

from db.clock import db_now
from db.models import Batch, File
from db.session import Database
from db.states import OPEN_BATCHES
from jobs.messages import storable

if TYPE_CHECKING:
    from jobs.upkeep.purge import Purged


def is_needed(database: Database, job_id: str) -> bool:
    """Whether a batch's output is still to be written from this job."""
    statement = select(Batch.id).where(Batch.job_id == storable(job_id), Batch.state.in_(OPEN_BATCHES)).limit(1)
    with database.read() as connection:
        return connection.execute(statement).first() is not None


def purge(database: Database, older_than_s: float, job_ids: Sequence[str], done: "Purged") -> None:
    """Forget batches that ended more than `older_than_s` ago, all or those of the named jobs."""
    ended_at = func.coalesce(Batch.completed_at, Batch.failed_at, Batch.expired_at, Batch.cancelled_at)
    is_old = Batch.state.not_in(OPEN_BATCHES) & (ended_at < db_now(literal(-older_than_s)))
    if job_ids:
        is_old &= Batch.job_id.in_(list(job_ids))
    if done.dry_run:
        with database.read() as connection:
            done.batches = connection.execute(select(func.count()).select_from(Batch).where(is_old)).scalar_one()
        return
    with database.write() as connection:
        for column in (Batch.output_file_id, Batch.error_file_id):
            ids = select(column).where(is_old, column.is_not(None))
            connection.execute(update(File).where(File.id.in_(ids)).values(expires_at=db_now()))
        done.batches = connection.execute(delete(Batch).where(is_old)).rowcount
