"""The tables. A job has shards (contiguous rows, leased as one) and requests (its rows); a request ends with one output
per sample, each with its statistics and its thread tree.

Counters live on shards, not on jobs: a shard has one writer, its lease holder, so workers never queue for a job's
row, and a status poll adds up a few thousand shards instead of counting a million requests. When a job ends its totals
are frozen into the job's row.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.clock import UtcDateTime

_BigId = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only INTEGER primary keys
_Ulid = String(26)
_OpenAiId = String(40)
"""`file-` or `batch_` and a ULID."""
_JOB_IS_OPEN = text("state IN ('queued', 'running', 'cancelling')")
_BATCH_IS_OPEN = text("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')")
DEFAULT_TENANT = "default"
"""Whose jobs are those of the command line, the drop folder, and an API without keys."""
MAX_TENANT_CHARS = 63


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Job(Base):
    """A user's batch."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_created_at", "created_at"),
        Index("ix_jobs_tenant_id", "tenant", "id"),
        Index("ix_jobs_open", "tenant", sqlite_where=_JOB_IS_OPEN, postgresql_where=_JOB_IS_OPEN),
        UniqueConstraint("tenant", "dedupe_key"),
    )

    id: Mapped[str] = mapped_column(_Ulid, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS), default=DEFAULT_TENANT, server_default=DEFAULT_TENANT)
    """Whose job it is; set at submit, never changed. The API shows it to no other tenant."""
    name: Mapped[str | None] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(16))
    model: Mapped[str] = mapped_column(String(63))
    decoding: Mapped[str] = mapped_column(String(16))
    sampling: Mapped[dict[str, Any]] = mapped_column(JSON)
    mapping: Mapped[dict[str, Any]] = mapped_column(JSON)
    """How rows become prompts: the column names or the template."""
    source: Mapped[str] = mapped_column(String(8))
    """`cli`, `api` or `drop`."""
    data_key: Mapped[str] = mapped_column(String(100))
    """The submitted file's name in the data store."""
    dedupe_key: Mapped[str | None] = mapped_column(String(64))
    """Set where the same content must be one job of its tenant (the drop folder)."""
    priority: Mapped[int] = mapped_column(Integer)
    kv_share: Mapped[float | None] = mapped_column(Float)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    num_completed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    num_failed: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    num_cancelled: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    error: Mapped[str | None] = mapped_column(Text)
    recipe: Mapped[str | None] = mapped_column(Text)
    """The recipe it was last run with, whole: paths absolute, templates put in."""
    webhook_id: Mapped[str | None] = mapped_column(_Ulid)
    """The webhook it named at submit. No foreign key: a webhook that is gone hears of nothing."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Shard(Base):
    """Rows [start_row, end_row) of a job: the unit of leasing."""

    __tablename__ = "shards"
    __table_args__ = (
        UniqueConstraint("job_id", "ordinal"),
        Index(
            "ix_shards_queue",
            "model",
            "queue_key",
            "id",
            sqlite_where=text("state = 'queued'"),
            postgresql_where=text("state = 'queued'"),
        ),
        Index(
            "ix_shards_leases",
            "lease_owner",
            "lease_expires_at",
            sqlite_where=text("state = 'leased'"),
            postgresql_where=text("state = 'leased'"),
        ),
        Index(
            "ix_shards_open",
            "job_id",
            sqlite_where=text("state IN ('queued', 'leased')"),
            postgresql_where=text("state IN ('queued', 'leased')"),
        ),
    )

    id: Mapped[int] = mapped_column(_BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    ordinal: Mapped[int] = mapped_column(Integer)
    start_row: Mapped[int] = mapped_column(BigInteger)
    end_row: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16))
    queue_key: Mapped[float] = mapped_column(Float(53))
    """Smallest first: the submission's epoch second, moved back by the priority's worth of waiting time. Because it
    never changes, ageing costs no writes, and whatever waits long enough comes first."""
    lease_owner: Mapped[str | None] = mapped_column(_Ulid)
    lease_token: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Counts leases; the fence: a write whose token is not the current one changes nothing."""
    lease_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    attempts: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """Leases that ended with the worker's death."""
    num_completed: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    num_failed: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    num_cancelled: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class Request(Base):
    """One input row."""

    __tablename__ = "requests"
    __table_args__ = (UniqueConstraint("job_id", "row_index"),)

    id: Mapped[int] = mapped_column(_BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    row_index: Mapped[int] = mapped_column(BigInteger)
    custom_id: Mapped[str | None] = mapped_column(Text)
    """The id column's value as text."""
    payload: Mapped[str | None] = mapped_column(Text)
    """JSON text, `{"prompt": …}` or `{"messages": […]}`; null where the row was refused at submit."""
    sampling: Mapped[str | None] = mapped_column(Text)
    """JSON text of the row's own sampling values, over the job's."""
    state: Mapped[str] = mapped_column(String(16))
    error_code: Mapped[str | None] = mapped_column(String(40))
    error: Mapped[str | None] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """Times this row alone was in the engine when the worker died."""


class Output(Base):
    """One finished sample of a request."""

    __tablename__ = "outputs"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012  (SQLAlchemy's protocol)

    request_id: Mapped[int] = mapped_column(_BigId, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    sample: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    text: Mapped[str] = mapped_column(Text)
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    output_tokens: Mapped[int] = mapped_column(Integer)
    turns: Mapped[str | None] = mapped_column(Text)
    """JSON text: the answers before this one, of a row with several turns."""
    logprobs: Mapped[str | None] = mapped_column(Text)
    """JSON text: log probabilities of the answer's tokens, where they were asked for."""
    cached_tokens: Mapped[int | None] = mapped_column(Integer)
    """Prompt tokens that the engine's prefix cache served; null where the engine does not say."""


class RequestStats(Base):
    """A sample's memory receipt; the columns are defined in docs/statistics.md."""

    __tablename__ = "request_stats"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    request_id: Mapped[int] = mapped_column(_BigId, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    sample: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    threads: Mapped[int] = mapped_column(Integer)
    forks: Mapped[int] = mapped_column(Integer)
    max_width: Mapped[int] = mapped_column(Integer)
    steps: Mapped[int] = mapped_column(Integer)
    peak_cached_tokens: Mapped[int] = mapped_column(Integer)
    peak_blocks: Mapped[int] = mapped_column(Integer)
    attended_tokens: Mapped[int] = mapped_column(BigInteger)
    sequential_peak_tokens: Mapped[int] = mapped_column(Integer)
    sequential_attended_tokens: Mapped[int] = mapped_column(BigInteger)
    preemptions: Mapped[int] = mapped_column(Integer)
    forwards: Mapped[int | None] = mapped_column(Integer)
    hit_rate: Mapped[float | None] = mapped_column(Float)
    acceptance_length: Mapped[float | None] = mapped_column(Float)
    decoding_efficiency: Mapped[float | None] = mapped_column(Float)
    draft_nodes: Mapped[int | None] = mapped_column(Integer)
    verify_nodes: Mapped[int | None] = mapped_column(Integer)
    """From `forwards` on: the reference backend's alone."""


class ThreadNode(Base):
    """One paragraph node of a sample's thread tree, written once, when the request is done."""

    __tablename__ = "thread_nodes"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    request_id: Mapped[int] = mapped_column(_BigId, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    sample: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    node: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    parent: Mapped[int | None] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(16))
    """`root`, `detail` (first child) or `sibling` (next sibling)."""
    thread: Mapped[int] = mapped_column(Integer)
    start: Mapped[int] = mapped_column(Integer)
    """Span [start, end) in tokens of the restored output."""
    end: Mapped[int] = mapped_column(Integer)
    first_step: Mapped[int] = mapped_column(Integer)
    """Engine steps of the node's first and last token, counted from the request's first sampled token (0)."""
    last_step: Mapped[int] = mapped_column(Integer)
    text_start: Mapped[int] = mapped_column(Integer, server_default="0")
    text_end: Mapped[int] = mapped_column(Integer, server_default="0")
    """The same span in characters of the output's text."""


class Worker(Base):
    """A worker process, from its start to its exit."""

    __tablename__ = "workers"
    __table_args__ = (Index("ix_workers_model_heartbeat", "model", "heartbeat_at"),)

    id: Mapped[str] = mapped_column(_Ulid, primary_key=True)
    model: Mapped[str] = mapped_column(String(63))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    """`starting`, `ready`, `draining` or `exited`."""
    engine: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    """The running engine's facts: block size, KV blocks, context length, versions."""
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    heartbeat_at: Mapped[datetime] = mapped_column(UtcDateTime)
    exited_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    exit_reason: Mapped[str | None] = mapped_column(Text)


class File(Base):
    """A file of the OpenAI-compatible API: uploaded input, or a batch's output."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_id", "tenant", "id"), Index("ix_files_data_key", "data_key"))

    id: Mapped[str] = mapped_column(_OpenAiId, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS))
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    data_key: Mapped[str] = mapped_column(String(100))
    """Its name in the data store; several files, and jobs, may share it."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Batch(Base):
    """A batch of the OpenAI-compatible API: a job, with the states and times of that contract."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_id", "tenant", "id"),
        Index("ix_batches_job_id", "job_id"),
        Index("ix_batches_fingerprint", "fingerprint"),
        Index("ix_batches_open", "id", sqlite_where=_BATCH_IS_OPEN, postgresql_where=_BATCH_IS_OPEN),
    )

    id: Mapped[str] = mapped_column(_OpenAiId, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"))
    """Null until the input file has been checked, and after the job was purged."""
    state: Mapped[str] = mapped_column(String(16))
    input_file_id: Mapped[str] = mapped_column(_OpenAiId)
    endpoint: Mapped[str] = mapped_column(String(40))
    completion_window: Mapped[str] = mapped_column(String(16))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON)
    """The client's `metadata`."""
    fingerprint: Mapped[str] = mapped_column(String(64))
    """Of tenant, file, endpoint and body: a repeated creation finds the first one's batch."""
    model: Mapped[str | None] = mapped_column(String(63))
    """Null until the input file has been checked."""
    options: Mapped[dict[str, Any]] = mapped_column(JSON)
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    output_file_id: Mapped[str | None] = mapped_column(_OpenAiId)
    error_file_id: Mapped[str | None] = mapped_column(_OpenAiId)
    totals: Mapped[dict[str, int] | None] = mapped_column(JSON)
    """Lines and tokens, frozen when its files are written."""
    claimed_by: Mapped[str | None] = mapped_column(_Ulid)
    claimed_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """The API process that checks its input or writes its output, so that others need not do the same work."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    in_progress_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finalizing_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    failed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    expired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancelling_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancelled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ApiKey(Base):
    """A key of the REST API, without its secret. Rows are never deleted: see jobs/keys.py."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(_Ulid, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    """Of `submit`, `read` and `admin`."""
    secret_sha256: Mapped[str] = mapped_column(String(64))
    """In hexadecimal digits."""
    rate_per_minute: Mapped[int | None] = mapped_column(Integer)
    """Goes before the setting `api.rate_per_minute`."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """To about a minute."""


class Webhook(Base):
    """An address that is told when jobs of its tenant change their state. A removed one stays for its purge."""

    __tablename__ = "webhooks"
    __table_args__ = (Index("ix_webhooks_tenant", "tenant"),)

    id: Mapped[str] = mapped_column(_Ulid, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS))
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]] = mapped_column(JSON)
    """Of `job.running`, `job.completed`, `job.failed`, `job.cancelled`."""
    every_job: Mapped[bool] = mapped_column(Boolean)
    """False: only of jobs that name it at submit."""
    state: Mapped[str] = mapped_column(String(16))
    secret: Mapped[str] = mapped_column(String(100))
    """`whsec_` and base64, as it is: it signs, so a hash would not do. Empty once removed."""
    old_secret: Mapped[str | None] = mapped_column(String(100))
    """The one before the rotation; it signs beside the new one until `old_secret_until`."""
    old_secret_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    num_failures: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """Attempts that failed since the last one that did not."""
    resume_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Of a failing one: nothing is sent before."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    removed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class WebhookDelivery(Base):
    """One event for one webhook, written in the transaction that changed the job's state: the outbox.

    `attempts` counts claims and is the fence: whoever claimed it earlier than another cannot write for that one.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("event_id", "webhook_id"),
        Index("ix_webhook_deliveries_webhook_id_job_id", "webhook_id", "job_id"),
        Index("ix_webhook_deliveries_job_id", "job_id"),
        Index(
            "ix_webhook_deliveries_due",
            "next_attempt_at",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
    )

    id: Mapped[int] = mapped_column(_BigId, primary_key=True)
    event_id: Mapped[str] = mapped_column(String(30))
    """`evt_` and a ULID; the receiver's key against doubles, the same at every attempt."""
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    """Null for a ping."""
    type: Mapped[str] = mapped_column(String(40))
    payload: Mapped[str] = mapped_column(Text)
    """The body as it is signed and sent, JSON."""
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    next_attempt_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """While somebody sends it: when it counts as not sent."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    delivered_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_status: Mapped[int | None] = mapped_column(Integer)
    """HTTP status of the last attempt that got an answer."""
    last_error: Mapped[str | None] = mapped_column(Text)
