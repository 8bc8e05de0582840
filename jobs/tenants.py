"""Whose jobs are whose. The command line and the drop folder are the operator's and see all; the API asks here."""

import re

from sqlalchemy import select

from db.models import MAX_TENANT_CHARS, Job
from db.session import Database
from jobs.errors import BadInput
from jobs.messages import storable
from jobs.service import no_job

_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}")


def check_name(tenant: str) -> str:
    """Raises BadInput: no name for a tenant."""
    if not _NAME.fullmatch(tenant):
        raise BadInput(
            f"tenant is {tenant[:80]!r}: use lower-case letters, digits, '.', '_', '-', at most {MAX_TENANT_CHARS}"
        )
    return tenant


def check_job(database: Database, job_id: str, tenant: str) -> None:
    """A job's tenant never changes, so what is found here stays true for the rest of a request.

    Raises:
        NotFound: no such job, or another tenant's.
    """
    statement = select(Job.id).where(Job.id == storable(job_id), Job.tenant == tenant)
    with database.read() as connection:
        if connection.execute(statement).one_or_none() is None:
            raise no_job(job_id)
