"""A Python client of the REST API: submit a table, wait, read the answers as Arrow batches.

    from jobs.client import Client

    with Client("http://127.0.0.1:8765") as client:
        job = client.submit(table, prompt_column="prompt", max_tokens=128)
        job.wait()
        answers = job.to_table()

It needs httpx, pyarrow and tenacity alone: neither a database nor the settings of the machine it runs on.
"""

from jobs.client.client import Client, Job
from jobs.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    NotAllowedError,
    NotFoundError,
    RefusedError,
    ServiceError,
    StillRunningError,
    TooManyError,
    UnreachableError,
)
from jobs.client.options import SubmitOptions
from jobs.client.replies import Counts, JobStatus, Model

__all__ = [
    "ApiError",
    "Client",
    "ClientError",
    "ConflictError",
    "Counts",
    "Job",
    "JobStatus",
    "Model",
    "NotAllowedError",
    "NotFoundError",
    "RefusedError",
    "ServiceError",
    "StillRunningError",
    "SubmitOptions",
    "TooManyError",
    "UnreachableError",
]
