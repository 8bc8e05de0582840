"""What a decoder gives back: the restored answer, its tree, its figures, and a trace of every step.

Sources: HR, AL and DE as in the PTD paper, section 4.1; the receipt's figures as in docs/statistics.md.
"""

from dataclasses import dataclass
from typing import Literal

from apar.tree import Span


@dataclass(frozen=True, slots=True)
class ThreadPath:
    address: tuple[int, ...]
    """How to get here from the root thread `()`: the ordinal, from 0, of the fork to take in each thread."""
    path: tuple[int, ...]
    """All tokens it attends to or sampled: prompt, control tokens and its EOS included."""


@dataclass(frozen=True, slots=True)
class ThreadStep:
    """What one thread did in one forward."""

    thread: int
    num_draft_nodes: int
    """Nodes that were not up for verification."""
    num_candidates: int
    """Nodes of the candidate tree."""
    num_taken: int
    """Tokens the thread's path grew by."""


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """How drafting went, over all threads of an answer."""

    forwards: int
    thread_steps: int
    """Forwards, each counted once per thread in it."""
    hits: int
    """Thread steps with a candidate tree."""
    accepted: int
    """Drafted tokens that were taken."""
    draft_nodes: int
    """Nodes computed to draft, in all steps."""
    verify_nodes: int
    """Nodes computed to be verified."""

    @property
    def hit_rate(self) -> float:
        """HR: the share of steps that had a candidate tree."""
        return self.hits / self.thread_steps if self.thread_steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """AL: 1 + the mean number of accepted drafts over the steps that had a candidate tree; 1 without any."""
        return 1 + self.accepted / self.hits if self.hits else 1.0


@dataclass(frozen=True, slots=True)
class DecodingResult:
    token_ids: list[int]
    """The restored answer, the root thread's EOS or the stop token included, control tokens left out."""
    finish_reason: Literal["stop", "length"]
    stop_token_id: int | None
    """The caller's stop token that ended the answer; None when EOS or a limit did."""
    nodes: list[Span]
    """The paragraph tree, depth first, over the restored tokens. Steps are forwards, from 0."""
    threads: list[ThreadPath]
    """By number: the root, then in order of creation."""
    num_forks: int
    stats: dict[str, int]
    """The memory receipt, as `apar.receipt.Receipt.stats` gives it. A KV block is one position here."""
    drafting: DraftFigures
    trace: list[list[ThreadStep]]
    """Per forward, what each of its threads did."""

    @property
    def decoding_efficiency(self) -> float:
        """DE: output tokens per forward. Without forks this is HR x AL + (1 - HR)."""
        return len(self.token_ids) / self.drafting.forwards
