"""What the service says, as frozen dataclasses. Keys that a newer service adds are passed over."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

State = Literal["queued", "running", "completed", "failed", "cancelling", "cancelled"]
ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Counts:
    """Rows of a job; those neither completed, failed nor cancelled still wait or run."""

    total: int
    completed: int
    failed: int
    cancelled: int

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled


@dataclass(frozen=True)
class JobStatus:
    """A job as it stands."""

    job_id: str
    name: str | None
    state: State
    model: str
    decoding: str
    counts: Counts
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    eta_s: float | None
    """Seconds to the end at the pace so far."""
    output_tokens: int
    error: str | None
    """Why the job failed, or why it stands still."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Self:
        known = {name: reply[name] for name in cls.__dataclass_fields__}
        counts = Counts(**{name: reply["counts"][name] for name in Counts.__dataclass_fields__})
        moments = {
            name: None if reply[name] is None else datetime.fromisoformat(reply[name])
            for name in ("created_at", "started_at", "finished_at")
        }
        return cls(**{**known, **moments, "counts": counts})


@dataclass(frozen=True)
class Model:
    """A model that a job may name."""

    id: str
    is_default: bool
    max_model_len: int | None
    """Tokens of prompt and answer together; None: the model's own."""
    default_max_tokens: int
    kv_budget: str | None

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Self:
        return cls(**{name: reply[name] for name in cls.__dataclass_fields__})
