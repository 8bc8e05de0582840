"""Who works on a batch just now: a claim that lapses unless it is renewed, so that no killed process holds it up."""

from collections.abc import Collection

from sqlalchemy import literal, literal_column, or_, update

from db.clock import db_now
from db.models import Batch
from db.session import Database
from db.states import OPEN_BATCHES

# Written out, not bound: a planner that does not know the values cannot use the partial index `ix_batches_open`, and
# SQLite's wants them in the order of the index.
IS_OPEN = Batch.state.in_([literal_column(f"'{state}'") for state in OPEN_BATCHES])


def claim(database: Database, batch_id: str, owner: str, seconds: float) -> bool:
    """False where another has it, or it has ended."""
    is_free = or_(Batch.claimed_until.is_(None), Batch.claimed_until <= db_now())
    with database.write() as connection:
        return (
            connection.execute(
                update(Batch)
                .where(Batch.id == batch_id, IS_OPEN, is_free)
                .values(claimed_by=owner, claimed_until=db_now(literal(seconds)))
            ).rowcount
            == 1
        )


def renew(database: Database, batch_ids: Collection[str], owner: str, seconds: float) -> None:
    with database.write() as connection:
        connection.execute(
            update(Batch)
            .where(Batch.id.in_(batch_ids), Batch.claimed_by == owner)
            .values(claimed_until=db_now(literal(seconds)))
        )


def release(database: Database, batch_id: str, owner: str, after_s: float = 0.0) -> None:
    """Let it go; `after_s` keeps everybody from it for a while, where what stands in the way takes time."""
    with database.write() as connection:
        connection.execute(
            update(Batch)
            .where(Batch.id == batch_id, Batch.claimed_by == owner)
            .values(claimed_by=None, claimed_until=db_now(literal(after_s)))
        )
