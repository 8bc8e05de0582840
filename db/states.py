"""The states of jobs, shards and requests, and which may follow which."""

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "queued"
    """Rows and shards are stored; no worker has leased any of them yet."""
    RUNNING = "running"
    """At least one shard has been leased."""
    COMPLETED = "completed"
    """Every row has an answer or an error. Rows that failed do not make the job fail."""
    FAILED = "failed"
    """The job could not run at all; `error` says why."""
    CANCELLING = "cancelling"
    """A user asked to stop; shards still leased are being let go."""
    CANCELLED = "cancelled"
    """Stopped; rows finished before keep their answers."""


class ShardState(StrEnum):
    QUEUED = "queued"
    """Waits for a worker; free to lease."""
    LEASED = "leased"
    """Owned by one worker until `lease_expires_at`; every write of that worker carries the lease's token."""
    DONE = "done"
    """Every row of it has ended."""
    CANCELLED = "cancelled"
    """Its unfinished rows were given up because the job was cancelled."""


class RequestState(StrEnum):
    QUEUED = "queued"
    """Not answered yet (waiting or in an engine: only the lease knows which)."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Ended with `error_code` and `error`."""
    CANCELLED = "cancelled"


class BatchState(StrEnum):
    """Of the OpenAI-compatible API."""

    VALIDATING = "validating"
    """Its input file waits to be checked, or is being checked; there is no job yet."""
    IN_PROGRESS = "in_progress"
    """Its job is queued or runs."""
    FINALIZING = "finalizing"
    """Every row has ended, or the time is over; its output is being written."""
    COMPLETED = "completed"
    FAILED = "failed"
    """The input file was refused; `errors` says why."""
    EXPIRED = "expired"
    """The time was over; rows answered before keep their answers."""
    CANCELLING = "cancelling"
    """A user asked to stop; the job ends, and then its output is written."""
    CANCELLED = "cancelled"


OPEN_BATCHES = (BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING)
"""The states that end by themselves, each by a compare-and-swap (jobs/batch_work.py)."""


class WebhookState(StrEnum):
    ACTIVE = "active"
    FAILING = "failing"
    """The last attempts all failed: it is tried seldom, one event at a time, until one is taken."""
    GONE = "gone"
    """Its receiver answered 410: nothing is sent any more."""
    REMOVED = "removed"
    """By its owner. The row stays until a purge, so that a job that is just ending can still refer to it."""


class DeliveryState(StrEnum):
    PENDING = "pending"
    """To be sent at `next_attempt_at`, or being sent until then."""
    DELIVERED = "delivered"
    """The receiver answered 2xx."""
    FAILED = "failed"
    """Given up; `last_error` says why."""


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLING, JobState.CANCELLED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    # `retry` alone leaves an end state, and only where rows failed.
    JobState.COMPLETED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}

ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


def sources_of(target: JobState) -> list[JobState]:
    """The states from which a job may enter `target`: the WHERE clause of every transition."""
    return [source for source, targets in JOB_TRANSITIONS.items() if target in targets]
