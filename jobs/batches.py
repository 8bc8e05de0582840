"""Batches of the OpenAI-compatible API: create, look at, list, cancel.

A batch is a job with the states and times of that contract. Here only its row changes; jobs/batch_work.py takes it on.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, insert, literal, select, update
from ulid import ULID

from db import locks
from db.clock import db_now
from db.models import Batch, Job, Shard
from db.session import Database
from db.states import BatchState
from jobs import ending
from jobs.batch_bodies import ENDPOINTS
from jobs.errors import BadInput, Conflict, NotFound
from jobs.messages import storable
from jobs.openai_files import INPUT, check_expiry, find_within
from jobs.reading import Reading
from jobs.settings import Settings
from jobs.submit import SubmitOptions, check_options
from jobs.templates import MAX_TEMPLATE_CHARS

PREFIX = "batch_"
MAX_LIST = 100
MAX_LABELS, MAX_LABEL_CHARS, MAX_LABEL_VALUE_CHARS = 16, 64, 512
"""Of `metadata`, as OpenAI has them."""
MAX_WINDOW_S = 30 * 24 * 3600
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_GIVEN_UP = (BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLING, BatchState.CANCELLED)
"""States of a batch that is no answer to asking for one again."""
_CANCELLABLE = (BatchState.VALIDATING, BatchState.IN_PROGRESS)
_STAMPS = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
_OPTIONS = (
    "decoding", "priority", "kv_share", "prompt_column", "messages_column", "template", "id_column", "sampling",
)  # fmt: skip
"""What a batch's `options` may hold for its job, named as `SubmitOptions` does."""
_TEXTS = ("prompt_column", "messages_column", "template", "id_column")
_VIEWED = (
    Batch.id, Batch.state, Batch.job_id, Batch.input_file_id, Batch.endpoint, Batch.completion_window, Batch.labels,
    Batch.model, Batch.errors, Batch.output_file_id, Batch.error_file_id, Batch.totals, Batch.created_at,
    *(getattr(Batch, name) for name in _STAMPS),
)  # fmt: skip
"""What `_view` shows: without the options, whose template may be a megabyte in each batch of a list."""


@dataclass(frozen=True)
class NewBatch:
    """What a client asks for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    labels: dict[str, str] | None = None
    """Its `metadata`."""
    output_expires_s: int | None = None
    model: str | None = None
    """For all rows; without it the lines say it."""
    options: dict[str, Any] = field(default_factory=dict)
    """See `_OPTIONS`; what was not said is left out."""


def create(database: Database, settings: Settings, asked: NewBatch, tenant: str, sees: str | None) -> dict[str, Any]:
    """Store a batch that waits to be validated. The same again within `batches.repeat_s` is the same batch: clients
    retry what they got no answer to, without saying so.

    Args:
        tenant: whose batch it is.
        sees: of which tenant its input file must be; None for any.

    Raises:
        BadInput: a value is refused.
        NotFound: no such file.
    """
    window_s = window_seconds(asked.completion_window)
    _check(settings, asked)
    fingerprint = _fingerprint(asked, tenant)
    with database.write() as connection:
        locks.hold(connection, "batch", fingerprint)  # two retries may come at once
        file = find_within(connection, asked.input_file_id, sees, holding=True)
        if file.purpose != INPUT:
            raise BadInput(f"file {file.id} has the purpose {file.purpose!r}: a batch is made of one with {INPUT!r}")
        first = connection.execute(
            select(*_VIEWED)
            .where(
                Batch.fingerprint == fingerprint,
                Batch.tenant == tenant,
                Batch.state.not_in(_GIVEN_UP),
                Batch.created_at > db_now(literal(-settings.batches.repeat_s)),
            )
            .limit(1)
        ).one_or_none()
        if first is not None:
            return _views(connection, [first])[0]
        row = connection.execute(
            insert(Batch)
            .values(
                id=f"{PREFIX}{ULID()}",
                tenant=tenant,
                state=BatchState.VALIDATING,
                input_file_id=file.id,
                endpoint=asked.endpoint,
                completion_window=asked.completion_window,
                labels=asked.labels,
                fingerprint=fingerprint,
                model=asked.model,
                options={"job": asked.options, "output_expires_s": asked.output_expires_s},
                created_at=db_now(),
                expires_at=db_now(literal(float(window_s))),
            )
            .returning(*_VIEWED)
        ).one()
        return _views(connection, [row])[0]


def window_seconds(text: str) -> int:
    """Raises BadInput: no window that we know."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise BadInput(f"completion_window is {text[:40]!r}: write minutes, hours or days as 30m, 24h or 7d, up to 30d")
    return seconds


def find(database: Database, batch_id: str, tenant: str | None) -> dict[str, Any]:
    """
    Raises:
        NotFound: no such batch, or another tenant's.
    """
    statement = select(*_VIEWED).where(Batch.id == storable(batch_id))
    if tenant is not None:
        statement = statement.where(Batch.tenant == tenant)
    with database.read() as connection:
        row = connection.execute(statement).one_or_none()
        if row is None:
            raise no_batch(batch_id)
        return _views(connection, [row])[0]


def list_batches(
    database: Database, tenant: str | None, *, after: str | None = None, limit: int = 20
) -> tuple[list[dict[str, Any]], bool]:
    """A page of the newest first, and whether more follow; `after` is the last id of the page before."""
    statement = select(*_VIEWED).order_by(Batch.id.desc()).limit(limit + 1)
    if tenant is not None:
        statement = statement.where(Batch.tenant == storable(tenant))
    if after is not None:
        statement = statement.where(Batch.id < storable(after))
    with database.read() as connection:
        rows = connection.execute(statement).all()
        return _views(connection, rows[:limit]), len(rows) > limit


def cancel(database: Database, batch_id: str, tenant: str | None) -> dict[str, Any]:
    """Ask a batch to stop; rows answered by then keep their answers. Asking again while it stops is fine.

    Raises:
        NotFound: no such batch, or another tenant's.
        Conflict: its rows have all ended.
    """
    which = Batch.id == storable(batch_id)
    if tenant is not None:
        which &= Batch.tenant == tenant
    with database.write() as connection:
        row = connection.execute(select(Batch.state, Batch.job_id).where(which).with_for_update()).one_or_none()
        if row is None:
            raise no_batch(batch_id)
        if row.state not in (*_CANCELLABLE, BatchState.CANCELLING):
            raise Conflict(f"batch {batch_id} is {row.state}: only one whose rows have not all ended can be cancelled")
        if row.state in _CANCELLABLE:
            # Without a job it has nothing to wait for.
            is_over = row.job_id is None
            values: dict[str, Any] = {"state": BatchState.CANCELLED if is_over else BatchState.CANCELLING}
            stamps = ("cancelling_at", "cancelled_at") if is_over else ("cancelling_at",)
            values.update({name: db_now() for name in stamps})
            connection.execute(update(Batch).where(Batch.id == batch_id).values(**values))
    if row.job_id is not None:
        cancel_job(database, row.job_id)
    return find(database, batch_id, tenant)


def cancel_job(database: Database, job_id: str) -> None:
    """Stop a batch's job, unless it has ended or is gone."""
    try:
        ending.cancel(database, job_id)
    except (Conflict, NotFound):
        return


def no_batch(batch_id: str) -> NotFound:
    shown = batch_id if len(batch_id) <= 40 else batch_id[:37] + "..."
    return NotFound(f"no batch {shown!r}")


def job_options(row: Row[*tuple[Any, ...]], reading: Reading) -> SubmitOptions:
    """How a batch's job is submitted."""
    said = {**row.options["job"], "model": reading.model, "decoding": reading.decoding}
    return SubmitOptions(name=row.id, source="api", tenant=row.tenant, **said)


def _check(settings: Settings, asked: NewBatch) -> None:
    if asked.endpoint not in ENDPOINTS:
        raise BadInput(f"endpoint is {asked.endpoint[:80]!r}: {' and '.join(ENDPOINTS)} are served")
    check_expiry(asked.output_expires_s)
    assert set(asked.options) <= set(_OPTIONS)
    labels = asked.labels or {}
    if len(labels) > MAX_LABELS:
        raise BadInput(f"metadata has {len(labels)} keys, the limit is {MAX_LABELS}")
    for key, value in labels.items():
        if not 0 < len(key) <= MAX_LABEL_CHARS or len(value) > MAX_LABEL_VALUE_CHARS:
            raise BadInput(
                f"metadata: keys have 1 to {MAX_LABEL_CHARS} characters, values at most {MAX_LABEL_VALUE_CHARS}"
            )
    for name in _TEXTS:  # a template is looked at more closely where the file is read, which is confined
        num_chars = len(asked.options.get(name, ""))
        if num_chars > MAX_TEMPLATE_CHARS:
            raise BadInput(f"{name} has {num_chars} characters, the limit is {MAX_TEMPLATE_CHARS}: shorten it")
    # The model may still be unknown here; then what depends on it is checked with the lines.
    model = asked.model if asked.model is not None else settings.default_model
    options = {"decoding": "ar"} if asked.model is None else {}
    check_options(settings, SubmitOptions(model=model, **{**asked.options, **options}))


def _fingerprint(asked: NewBatch, tenant: str) -> str:
    said = [
        tenant, asked.input_file_id, asked.endpoint, asked.completion_window, asked.labels, asked.output_expires_s,
        asked.model, asked.options,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _views(connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]) -> list[dict[str, Any]]:
    rows = list(rows)
    counts = _counts(connection, [row.job_id for row in rows if row.totals is None and row.job_id is not None])
    return [_view(row, row.totals or counts.get(row.job_id)) for row in rows]


def _counts(connection: Connection, job_ids: list[str]) -> dict[str, dict[str, int]]:
    """Rows of jobs whose batches have no totals yet; of those given up none is told before the error file is there."""
    if not job_ids:
        return {}
    done, failed = (func.coalesce(func.sum(column), 0) for column in (Shard.num_completed, Shard.num_failed))
    statement = (
        select(Job.id, Job.num_rows, done.label("completed"), failed.label("failed"))
        .join(Shard, Shard.job_id == Job.id)
        .where(Job.id.in_(job_ids))
        .group_by(Job.id, Job.num_rows)
    )
    return {
        row.id: {"total": int(row.num_rows), "completed": int(row.completed), "failed": int(row.failed)}
        for row in connection.execute(statement)
    }


def _view(row: Row[*tuple[Any, ...]], counts: dict[str, int] | None) -> dict[str, Any]:
    """As OpenAI writes it, with the job's id beside."""
    moments = {name: getattr(row, name) for name in _STAMPS}
    if row.state != BatchState.EXPIRED:  # set before that: see jobs/batch_work.py
        moments["expired_at"] = None
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.model,
        "errors": None if row.errors is None else {"object": "list", "data": row.errors},
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.state,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": int(row.created_at.timestamp()),
        **{name: None if value is None else int(value.timestamp()) for name, value in moments.items()},
        "request_counts": {key: (counts or {}).get(key, 0) for key in ("total", "completed", "failed")},
        "usage": None if row.totals is None else _usage(row.totals),
        "metadata": row.labels,
        "forq": {"job_id": row.job_id},
    }


def _usage(totals: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": totals["input_tokens"],
        "input_tokens_details": {"cached_tokens": totals["cached_tokens"]},
        "output_tokens": totals["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals["input_tokens"] + totals["output_tokens"],
    }
