"""What the shard loop needs from an engine: hand samples in, get finished samples back, know the limits.

`worker.engine.VllmBackend` and `worker.reference.ReferenceBackend` are the real ones. Everything that crosses here is
plain data, so that another engine, or one in another process, can stand behind it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from apar.tree import Span
from jobs.forking import VLLM_DECODINGS, forks
from jobs.results import Stats
from jobs.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the engine runs the samples of one job."""

    name: str = "ar"
    """One of `jobs.forking.DECODINGS`."""
    pool: str | None = None
    """Samples of one pool together hold at most `pool_share` of the KV budget while others wait: a job's id."""
    pool_share: float = 1.0
    job_id: str | None = None
    """Whose grammars they bring."""

    @property
    def forks(self) -> bool:
        """False: the model's [Fork] is banned."""
        return forks(self.name)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to generate. `key` is unique in the process."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    """Of the restored answer, all threads together."""
    seed: int | None
    decoding: Decoding = Decoding()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the engine counted for one answer; definitions in docs/statistics.md."""

    stats: Stats
    spans: tuple[Span, ...]
    """Depth first, node 0 the root."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sample."""

    key: str
    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    """The restored answer, the last end-of-sequence token included."""
    receipt: Receipt | None
    """None from an engine whose scheduler is not ours."""
    logprobs: str | None = None
    """As JSON, where the sample asked for them: see `jobs.results.SampleResult`."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache served; None from an engine that does not say."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine did not take this sample; the engine itself is well."""

    key: str
    message: str


Done = Callable[[Finished | Refused], None]
"""Called from the engine's own `threading.Thread`: must not block."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a started engine says of itself."""

    engine: str
    version: str
    block_size: int
    num_blocks: int
    """KV blocks that requests can use."""
    max_model_len: int
    """Tokens of one request, prompt and answer together, that context and KV budget both allow."""
    context_len: int
    """Tokens the model itself could take; larger than `max_model_len` where the KV budget is the limit."""
    max_num_seqs: int
    can_fork: bool = False
    """Whether the model has control tokens."""
    decodings: tuple[str, ...] = VLLM_DECODINGS
    """Those it runs, the forking ones if it can fork."""


class EngineDead(Exception):
    """The engine cannot go on; the process must end and be started again."""


class Backend(Protocol):
    @property
    def facts(self) -> EngineFacts: ...

    @property
    def failure(self) -> str | None:
        """Why the engine died, or None while it lives."""
        ...

    def submit(self, samples: Iterable[Sample], done: Done) -> None:
        """Queue samples; each is reported through `done` once, unless aborted.

        Raises:
            EngineDead: nothing was queued.
        """
        ...

    def abort(self, keys: Iterable[str]) -> None:
        """Forget samples; what has finished meanwhile may still be reported."""
        ...

    def shutdown(self) -> None:
        """Stop at once; whatever is unfinished is not reported."""
        ...
