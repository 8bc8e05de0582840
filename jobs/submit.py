"""Submitting: a file becomes a job, its shards and its requests, in one transaction.

The slow part, reading and checking every row, happens before that transaction, into a spool file: SQLite has one write
lock, and workers must not wait for a template to be rendered a million times.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, func, insert, select
from sqlalchemy.exc import IntegrityError
from ulid import ULID

from db.clock import db_now
from db.models import DEFAULT_TENANT, Job, Shard
from db.models import Request as RequestRow
from db.session import Database
from db.states import JobState, RequestState, ShardState
from jobs import depth, idempotency, store
from jobs.confined import read_confined
from jobs.errors import BadInput, Unavailable
from jobs.forking import check_decoding
from jobs.reading import ROW_COLUMNS, Reading, Request
from jobs.rows import Mapping
from jobs.sampling import Sampling, parse_sampling
from jobs.settings import Settings
from jobs.source import Progress, first_line
from jobs.webhooks.registry import named

MAX_NAME_CHARS = 200
MAX_PRIORITY = 1000
INSERT_ROWS = 4096

_REQUEST_COLUMNS = ("job_id", "row_index", "state", *ROW_COLUMNS)


Also = Callable[[Connection, str], None]
"""What else belongs into the transaction of a job, of this id; an exception rolls it back."""


@dataclass(frozen=True)
class SubmitOptions:
    """What a user may say about a job."""

    model: str
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    id_column: str | None = None
    system: str | None = None
    turn: tuple[str, ...] = ()
    """Templates of the later turns, in order."""
    decoding: str = "ar"
    sampling: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    kv_share: float | None = None
    name: str | None = None
    source: str = "cli"
    tenant: str = DEFAULT_TENANT
    """Who may see the job over the API; never said by a form or a job file, only by who asks."""
    dedupe: bool = False
    """The same content with the same options is one job of the tenant (the drop folder, recipes)."""
    idempotency_key: str | None = None
    """Of the API's client: jobs/idempotency.py."""
    recipe: str | None = None
    """The recipe file it is made from, in the words it is stored in."""
    webhook: str | None = None
    """The address of a webhook of the tenant: it hears of the job, also where it hears only of those that name it."""


@dataclass(frozen=True)
class Submitted:
    job_id: str
    model: str
    num_rows: int
    num_shards: int
    num_refused: int
    is_new: bool


def submit_file(
    database: Database, settings: Settings, path: Path, options: SubmitOptions, progress: Progress | None = None
) -> Submitted:
    """Check a file, store it and queue its rows; nothing is kept when it is refused.

    The caller rings the doorbell afterwards (`jobs.doorbell`): the job is already safe by then.

    Raises:
        BadInput: options or file cannot be used; one line that says what, which limit, and what to do.
        QueueFull: the tenant has as much in the queue as it may.
        Conflict: the idempotency key belongs to another submit.
    """
    sampling = check_options(settings, options)
    report = progress or (lambda phase, done, total: None)
    if options.webhook is not None:  # before a file is read for nothing
        named(database, options.webhook, options.tenant)
    try:
        return _submit(database, settings, path, options, sampling, report)
    except OSError as error:  # the scratch folder or the disk, not the file: that one raises BadInput
        raise Unavailable(
            f"{path.name} cannot be stored ({first_line(error)}): check space and rights in {tempfile.gettempdir()} "
            f"and {settings.home}"
        ) from None


def _submit(
    database: Database, settings: Settings, path: Path, options: SubmitOptions, sampling: Sampling, report: Progress
) -> Submitted:
    with tempfile.TemporaryDirectory(prefix="forq-submit-") as scratch:
        request = Request(
            path=path,
            model=options.model,
            prompt_column=options.prompt_column,
            messages_column=options.messages_column,
            template=options.template,
            id_column=options.id_column,
            shard_rows=settings.queue.shard_rows,
            system=options.system,
            turn=tuple(options.turn),
            decoding=options.decoding,
            # Files made for `vllm run-batch` name the model as the hub does. Over the API that would tell what an alias
            # stands for.
            also_called=settings.model(options.model).hub_id if options.source != "api" else None,
        )
        may_exist = options.dedupe or idempotency.is_used(database, options.tenant, options.idempotency_key)
        if not may_exist:  # what is a job already adds nothing to the queue
            depth.check(database, settings.limits, options.tenant, 1)
        reading = read_confined(request, settings.limits, Path(scratch), report)
        if not may_exist:
            depth.check(database, settings.limits, options.tenant, reading.num_to_answer)
        data_key = store.keep(settings, reading.kept, version=reading.version)
        dedupe_key = _dedupe_key(data_key, reading.mapping, sampling, options) if options.dedupe else None
        if options.idempotency_key is not None:
            dedupe_key = idempotency.dedupe_key(options.idempotency_key)
        submitted = _insert(database, settings, options, sampling, reading, data_key, dedupe_key, report)
        if options.idempotency_key is not None and not submitted.is_new:
            names = ("model", "decoding", "priority", "kv_share", "name")
            said = {"data_key": data_key, "mapping": reading.mapping.said(), "sampling": sampling.said()}
            idempotency.check_same(database, submitted.job_id, said | {name: getattr(options, name) for name in names})
        return submitted


def submit_reading(
    database: Database, settings: Settings, options: SubmitOptions, reading: Reading, report: Progress, also: Also
) -> Submitted:
    """`submit_file` for a file that was read already; `also` is done in the job's transaction.

    Raises:
        BadInput, QueueFull: as `submit_file`.
        OSError: the file cannot be stored.
    """
    sampling = check_options(settings, options)
    depth.check(database, settings.limits, options.tenant, reading.num_to_answer)
    data_key = store.keep(settings, reading.kept, version=reading.version)
    return _insert(database, settings, options, sampling, reading, data_key, None, report, also)


def check_options(settings: Settings, options: SubmitOptions) -> Sampling:
    """Check everything that does not need the file; returns the job's sampling values."""
    check_decoding(settings, options.model, options.decoding)
    if options.kv_share is not None and not 0 < options.kv_share <= 1:  # NaN too
        raise BadInput(f"--kv-share is {options.kv_share}: it must be above 0 and at most 1, the whole KV budget")
    if not -MAX_PRIORITY <= options.priority <= MAX_PRIORITY:
        raise BadInput(f"priority is {options.priority}: it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    if options.name is not None and not 0 < len(options.name) <= MAX_NAME_CHARS:
        raise BadInput(f"the name has {len(options.name)} characters: 1 to {MAX_NAME_CHARS} are allowed")
    if options.name is not None and not options.name.isprintable():
        raise BadInput("the name has control characters: use printable ones")
    limits = settings.limits
    return parse_sampling(options.sampling, max_n=limits.max_n, max_max_tokens=limits.max_max_tokens)


def _dedupe_key(data_key: str, mapping: Mapping, sampling: Sampling, options: SubmitOptions) -> str:
    options_said: list[Any] = [options.model, options.decoding, options.priority, options.name]
    if options.kv_share is not None:
        options_said.append(options.kv_share)
    if options.recipe is not None:  # a recipe's job is never a dropped file's, which has none stored
        options_said.append("recipe")
    said = [data_key, *options_said, mapping.said(), sampling.said()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _insert(
    database: Database,
    settings: Settings,
    options: SubmitOptions,
    sampling: Sampling,
    reading: Reading,
    data_key: str,
    dedupe_key: str | None,
    report: Progress,
    also: Also = lambda connection, job_id: None,
) -> Submitted:
    job_id = str(ULID())
    num_shards = len(reading.failed_per_shard)
    num_refused = sum(reading.failed_per_shard)
    webhook_id = None if options.webhook is None else named(database, options.webhook, options.tenant)
    try:
        with database.write() as connection:
            connection.execute(
                insert(Job).values(
                    id=job_id,
                    tenant=options.tenant,
                    name=options.name,
                    state=JobState.QUEUED,
                    model=options.model,
                    decoding=options.decoding,
                    sampling=sampling.said(),
                    mapping=reading.mapping.said(),
                    source=options.source,
                    data_key=data_key,
                    dedupe_key=dedupe_key,
                    priority=options.priority,
                    kv_share=options.kv_share,
                    num_rows=reading.num_rows,
                    recipe=options.recipe,
                    webhook_id=webhook_id,
                    created_at=db_now(),
                )
            )
            # After the job: a file that is one already, or is just becoming one, is found out before it counts.
            depth.claim(connection, settings.limits, options.tenant, reading.num_to_answer, job_id)
            _insert_shards(connection, settings, options, job_id, reading)
            for start, rows in _request_tuples(reading, job_id):
                _insert_requests(connection, database.is_sqlite, rows)
                report("storing", start + len(rows), reading.num_rows)
            also(connection, job_id)
    except IntegrityError:
        if dedupe_key is None:
            raise
        with database.read() as connection:
            is_same = (Job.tenant == options.tenant) & (Job.dedupe_key == dedupe_key)
            row = connection.execute(select(Job.id, Job.num_rows).where(is_same)).one()
        return Submitted(row.id, options.model, row.num_rows, num_shards, num_refused, is_new=False)
    return Submitted(job_id, options.model, reading.num_rows, num_shards, num_refused, is_new=True)


def _insert_shards(
    connection: Connection, settings: Settings, options: SubmitOptions, job_id: str, reading: Reading
) -> None:
    epoch = (
        func.extract("epoch", func.clock_timestamp())
        if connection.dialect.name == "postgresql"
        else (func.julianday("now") - 2440587.5) * 86400.0
    )
    now_s = float(connection.execute(select(epoch)).scalar_one())
    queue_key = now_s - options.priority * settings.queue.ageing_s_per_priority
    shard_rows = settings.queue.shard_rows
    connection.execute(
        insert(Shard),
        [
            {
                "job_id": job_id,
                "ordinal": ordinal,
                "start_row": ordinal * shard_rows,
                "end_row": min((ordinal + 1) * shard_rows, reading.num_rows),
                "model": options.model,
                "state": ShardState.QUEUED,
                "queue_key": queue_key,
                "num_failed": num_failed,
            }
            for ordinal, num_failed in enumerate(reading.failed_per_shard)
        ],
    )


def _request_tuples(reading: Reading, job_id: str) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Yield (first row's index, rows) in chunks of about `INSERT_ROWS`."""
    with pa.OSFile(str(reading.spool), "rb") as source, pa.ipc.open_stream(source) as batches:
        start = 0
        rows: list[tuple[Any, ...]] = []
        for batch in batches:
            columns = [batch.column(i).to_pylist() for i in range(batch.num_columns)]
            for offset, values in enumerate(zip(*columns, strict=True), start=start + len(rows)):
                state = RequestState.QUEUED if values[3] is None else RequestState.FAILED
                rows.append((job_id, offset, state.value, *values))
            if len(rows) >= INSERT_ROWS:
                yield start, rows
                start, rows = start + len(rows), []
        if rows:
            yield start, rows


def _insert_requests(connection: Connection, is_sqlite: bool, rows: list[tuple[Any, ...]]) -> None:
    names = ", ".join(_REQUEST_COLUMNS)
    table = RequestRow.__tablename__
    if is_sqlite:
        marks = ", ".join("?" * len(_REQUEST_COLUMNS))
        connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)  # noqa: S608
        return
    # COPY is three times as fast as executemany in PostgreSQL.
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
