"""Idempotency keys: a submit that is sent again, because its answer was lost, finds the job that it has made.

The key takes the place of the content's hash in `Job.dedupe_key`, so the database itself lets only one job have it.
"""

import hashlib
from typing import Any

from sqlalchemy import select

from db.models import Job
from db.session import Database
from jobs.errors import BadInput, Conflict

MAX_KEY_CHARS = 255


def check_key(key: str) -> str:
    """Raises BadInput: empty, too long, or not printable ASCII. Spaces neither: HTTP takes them away at the ends."""
    if not 0 < len(key) <= MAX_KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise BadInput(
            f"Idempotency-Key has {len(key)} characters: 1 to {MAX_KEY_CHARS}, printable ASCII, no spaces, are allowed"
        )
    return key


def dedupe_key(key: str) -> str:
    return hashlib.sha256(f"idempotency:{key}".encode()).hexdigest()


def is_used(database: Database, tenant: str, key: str | None) -> bool:
    if key is None:
        return False
    statement = select(Job.id).where(Job.tenant == tenant, Job.dedupe_key == dedupe_key(key))
    with database.read() as connection:
        return connection.execute(statement).first() is not None


def check_same(database: Database, job_id: str, said: dict[str, Any]) -> None:
    """Compare what is submitted now with a job that has its key; `said` are columns of `Job`.

    Raises:
        Conflict: the key was used for something else.
    """
    with database.read() as connection:
        job = connection.execute(select(*(getattr(Job, name) for name in said)).where(Job.id == job_id)).one()
    others = [name for name, value in said.items() if getattr(job, name) != value]
    if others:
        what = "another file" if "data_key" in others else f"another {', '.join(others)}"
        raise Conflict(f"this Idempotency-Key belongs to job {job_id}, with {what}: send a new key for a new job")
