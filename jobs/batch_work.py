"""Takes batches on: from their input file to a job, from the job's end to their files, over expiry and cancellation.

All that is known of a batch is in its row, so whoever looks next goes on where the last one was killed. Any number of
API processes may look: every change of state is a compare-and-swap on the state it comes from, in one transaction with
what belongs to it, the job or the files' rows. A claim only spares others the same long work; nothing depends on it.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection, Row, func, or_, select, update

from db.clock import db_now
from db.models import Batch, File, Job
from db.session import Database
from db.states import ENDED, BatchState, JobState
from jobs import depth, leases
from jobs.batch_check import BatchRules, RefusedLines, fault
from jobs.batch_claims import IS_OPEN
from jobs.batch_files import write_files
from jobs.batches import cancel_job, job_options
from jobs.confined import read_confined
from jobs.doorbell import ring
from jobs.errors import BadInput, QueueFull, Unavailable
from jobs.reading import Reading, Request
from jobs.settings import Settings
from jobs.source import Progress, first_line
from jobs.submit import Submitted, submit_reading

SCRATCH_PREFIX = "forq-submit-"
"""As submits': `forq purge` clears what a killed one left (jobs/upkeep/leftovers.py)."""

log = structlog.get_logger()


Work = Callable[[Database, Settings, str, Progress], None]


@dataclass(frozen=True)
class Todo:
    """A batch that needs work of seconds: `validate` or `write_out`."""

    batch_id: str
    do: Work
    age_s: float
    """Since its creation."""


class _OvertakenError(Exception):
    """The batch is in another state now: cancelled, expired, or taken on by another process. Rolls back."""


def look(database: Database, settings: Settings) -> list[Todo]:
    """Make every change of state that is quick, and say which batches need longer work that nobody does.

    Those first that could have been begun first, since their creation or since what kept them: so one that cannot go
    on, of a tenant whose queue is full, comes after the others', and again after a while.
    """
    statement = (
        select(
            Batch.id, Batch.state, Batch.job_id, Batch.expired_at, Batch.created_at, Job.state.label("job_state"),
            db_now().label("now"),
            (Batch.expires_at <= db_now()).label("is_late"),
            or_(Batch.claimed_until.is_(None), Batch.claimed_until <= db_now()).label("is_free"), File.data_key,
        )
        .outerjoin(Job, Job.id == Batch.job_id)
        .outerjoin(File, File.id == Batch.input_file_id)
        .where(IS_OPEN)
        .order_by(func.coalesce(Batch.claimed_until, Batch.created_at), Batch.id)
    )  # fmt: skip
    with database.read() as connection:
        rows = connection.execute(statement).all()
    todos = []
    for row in rows:
        do = _advance(database, row)
        # Where FORQ_HOME is not shared, a file is read on the machine that has it.
        is_elsewhere = row.data_key is not None and not (settings.data_dir / row.data_key).is_file()
        if do is not None and row.is_free and not (do is validate and is_elsewhere):
            todos.append(Todo(row.id, do, (row.now - row.created_at).total_seconds()))
    if any(row.job_state == JobState.CANCELLING for row in rows):
        # Where no worker lives, nobody else takes back what a killed one held.
        leases.sweep(database)
    return todos


def _advance(database: Database, row: Row[*tuple[Any, ...]]) -> Work | None:
    move = partial(_move, database, row.id, row.state)
    if row.state == BatchState.VALIDATING:
        if row.is_late:
            move(BatchState.EXPIRED, expired_at=db_now())
            return None
        return validate
    if row.job_id is None:
        if row.state == BatchState.CANCELLING:
            move(BatchState.CANCELLED, cancelled_at=db_now())
        else:
            errors = [fault("job_purged", "the batch's job was purged before its output was written")]
            move(BatchState.FAILED, failed_at=db_now(), errors=errors)
        return None
    if row.state == BatchState.IN_PROGRESS:
        if row.job_state in ENDED:
            move(BatchState.FINALIZING, finalizing_at=db_now())
            return write_out
        # The moment is noted before the job is stopped: killed in between, the next look knows what to do.
        if row.is_late and move(BatchState.FINALIZING, finalizing_at=db_now(), expired_at=db_now()):
            cancel_job(database, row.job_id)
        return None
    if row.job_state in ENDED:
        return write_out
    if row.state == BatchState.CANCELLING or row.expired_at is not None:
        if row.job_state != JobState.CANCELLING:
            cancel_job(database, row.job_id)
    else:  # `forq retry` opened the job again
        move(BatchState.IN_PROGRESS, finalizing_at=None)
    return None


def validate(database: Database, settings: Settings, batch_id: str, report: Progress) -> None:
    """Check a batch's input file and make it a job, or refuse it.

    Raises:
        Unavailable, QueueFull: not now; the batch waits.
    """
    found = _with_file(database, batch_id)
    if found is None or found.state != BatchState.VALIDATING:
        return
    try:
        submitted = _submit(database, settings, found, report)
    except _OvertakenError:
        return
    except RefusedLines as error:
        _refuse(database, batch_id, error.faults)
    except BadInput as error:
        _refuse(database, batch_id, [fault("invalid_file", str(error))])
    else:
        log.info("batch_submitted", batch=batch_id, job=submitted.job_id, rows=submitted.num_rows, tenant=found.tenant)
        ring(settings, submitted.model, submitted.num_shards)


def write_out(database: Database, settings: Settings, batch_id: str, report: Progress) -> None:
    """Write the files of a batch whose job has ended, and end the batch with them.

    Raises:
        Unavailable: they cannot be written now.
    """
    with database.read() as connection:
        batch = connection.execute(select(Batch.__table__).where(Batch.id == batch_id)).one_or_none()
        job = connection.execute(select(Job.__table__).where(Job.id == batch.job_id)).one_or_none() if batch else None
    if batch is None or job is None or batch.state not in (BatchState.FINALIZING, BatchState.CANCELLING):
        return
    if job.state not in ENDED:
        return
    target = _target(batch, job)
    files = write_files(database, settings, batch, is_late=target == BatchState.EXPIRED, report=report)
    stamp = {"expired_at": db_now() if target == BatchState.EXPIRED else None}
    if target != BatchState.EXPIRED:
        stamp[f"{target}_at"] = db_now()
    try:
        with database.write() as connection:
            rows = files.insert(connection, batch)
            if not _swap(connection, batch_id, batch.state, target, totals=files.totals, **rows, **stamp):
                raise _OvertakenError
            if not files.agree_with(connection, batch.job_id):  # a retry came between: the next look sees its job run
                raise _OvertakenError
    except _OvertakenError:
        return
    log.info("batch_ended", batch=batch_id, job=batch.job_id, state=target, **files.totals)


def _target(batch: Row[*tuple[Any, ...]], job: Row[*tuple[Any, ...]]) -> BatchState:
    if batch.state == BatchState.CANCELLING:
        return BatchState.CANCELLED
    if job.num_cancelled == 0:  # all rows were answered, if only just
        return BatchState.COMPLETED
    return BatchState.EXPIRED if batch.expired_at is not None else BatchState.CANCELLED


def _with_file(database: Database, batch_id: str) -> Row[*tuple[Any, ...]] | None:
    """With its file's, also if that was deleted since: its content stays for a while."""
    statement = (
        select(Batch.__table__, File.data_key, File.filename)
        .outerjoin(File, File.id == Batch.input_file_id)
        .where(Batch.id == batch_id)
    )
    with database.read() as connection:
        return connection.execute(statement).one_or_none()


def _submit(database: Database, settings: Settings, batch: Row[*tuple[Any, ...]], report: Progress) -> Submitted:
    if batch.data_key is None:
        raise BadInput("the input file was deleted before it was read: upload it again")
    stored = settings.data_dir / batch.data_key
    if not stored.is_file():
        raise Unavailable(f"the content of {batch.input_file_id} is not on this machine")
    # Before the file is read, which takes long: a batch may wait for days, and is looked at all the while.
    depth.check(database, settings.limits, batch.tenant, batch.options.get("num_to_answer", 1))

    def also(connection: Connection, job_id: str) -> None:
        values = {"job_id": job_id, "model": reading.model, "in_progress_at": db_now()}
        if not _swap(connection, batch.id, BatchState.VALIDATING, BatchState.IN_PROGRESS, **values):
            raise _OvertakenError

    try:
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as folder:
            reading = _read(settings, batch, stored, Path(folder), report)
            return submit_reading(database, settings, job_options(batch, reading), reading, report, also)
    except QueueFull:
        _note_rows(database, batch, reading.num_to_answer)
        raise
    except OSError as error:  # the scratch folder or the store, not the input: that one raises BadInput
        raise Unavailable(
            f"batch {batch.id} cannot be read or stored ({first_line(error)}): check space and rights in "
            f"{tempfile.gettempdir()} and {settings.home}"
        ) from None


def _note_rows(database: Database, batch: Row[*tuple[Any, ...]], num_to_answer: int) -> None:
    """How much room a batch needs that was read in vain, so that it is not read again before there is as much."""
    options = {**batch.options, "num_to_answer": num_to_answer}
    with database.write() as connection:
        connection.execute(update(Batch).where(Batch.id == batch.id).values(options=options))


def _read(settings: Settings, batch: Row[*tuple[Any, ...]], stored: Path, scratch: Path, report: Progress) -> Reading:
    # Under the name it was uploaded with, which messages quote; the suffix says how it was stored.
    (scratch / "input").mkdir()
    path = scratch / "input" / f"{Path(batch.filename).stem}{stored.suffix}"
    path.symlink_to(stored)
    said = batch.options["job"]
    rules = BatchRules(
        endpoint=batch.endpoint,
        aliases=tuple(sorted(settings.models)),
        default_model=settings.default_model,
        model=batch.model,
        decoding=said.get("decoding"),
        max_lines=settings.batches.max_lines,
        max_bytes=settings.batches.max_file_bytes,
    )
    columns = ("prompt_column", "messages_column", "template", "id_column")
    request = Request(
        path=path,
        model=batch.model or settings.default_model,
        **{name: said.get(name) for name in columns},
        shard_rows=settings.queue.shard_rows,
        rules=rules,
    )
    return read_confined(request, settings.limits, scratch, report)


def _refuse(database: Database, batch_id: str, faults: list[dict[str, Any]]) -> None:
    if _move(database, batch_id, BatchState.VALIDATING, BatchState.FAILED, failed_at=db_now(), errors=faults):
        log.info("batch_refused", batch=batch_id, code=faults[0]["code"], faults=len(faults))


def _move(database: Database, batch_id: str, source: str, target: BatchState, **values: Any) -> bool:
    with database.write() as connection:
        return _swap(connection, batch_id, source, target, **values)


def _swap(connection: Connection, batch_id: str, source: str, target: BatchState, **values: Any) -> bool:
    """False where it is in another state already."""
    values = {"claimed_by": None, "claimed_until": None, **values}
    return (
        connection.execute(
            update(Batch).where(Batch.id == batch_id, Batch.state == source).values(state=target, **values)
        ).rowcount
        == 1
    )
