"""The first stage: the base model answers the prompts, as a job of our own service, which is started if need be."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from db.session import Database
from jobs import doorbell, parts, service
from jobs.console import Advance
from jobs.errors import ForqError, Unavailable
from jobs.export import export_job
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file

POLL_S = 0.5
ENDED = ("completed", "failed", "cancelled")


def submit_prompts(
    database: Database, settings: Settings, prompts: Path, options: SubmitOptions, progress: Advance
) -> str:
    """Submit the job, once for the same file and options; returns its id."""
    submitted = submit_file(database, settings, prompts, options, progress)
    doorbell.ring(settings, options.model, submitted.num_shards)
    return submitted.job_id


def export_answers(database: Database, settings: Settings, job_id: str, out: Path, progress: Advance) -> dict[str, Any]:
    """Wait for the job, then write its rows with their answers to `out`; returns the job's counts.

    Raises:
        Unavailable: the job did not complete.
    """
    while True:
        value = service.job_status(database, job_id)
        counts: dict[str, Any] = value["counts"]
        progress("answers", counts["completed"] + counts["failed"] + counts["cancelled"], counts["total"])
        if value["state"] in ENDED:
            break
        time.sleep(POLL_S)
    if value["state"] != "completed":
        raise Unavailable(f"job {job_id} of the answers has {value['state']}: {value['error'] or 'begin a new --out'}")
    export_job(database, settings, job_id, out, progress=progress)
    return counts


@contextlib.contextmanager
def serving(settings: Settings, alias: str) -> Iterator[None]:
    """A worker for the alias, for the time of the block: one that runs already, or a service of our own.

    Raises:
        Unavailable: the service runs, with another model only, or it does not start.
    """
    running = parts.running(settings)
    if any(part["role"] == "worker" and part.get("model") == alias for part in running):
        yield
        return
    if any(part["role"] == "up" for part in running):
        raise Unavailable(f"forq is up without a worker for {alias!r}: start `forq worker --model {alias}` beside it")
    forq("up", "--detach", "--model", alias)
    try:
        yield
    finally:
        forq("down")


def forq(*arguments: str, shown: bool = False) -> None:
    """Run a forq command in a process of its own, its output discarded or `shown`.

    Raises:
        ForqError: it failed; with its own line.
    """
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.DEVNULL,
        stderr=None if shown else subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        reason = (done.stderr or "").strip().removeprefix("forq: ")
        raise ForqError(reason or f"`forq {arguments[0]}` ended with exit code {done.returncode}")
