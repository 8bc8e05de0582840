"""The memory receipt of one request: what its threads held in the KV cache, counted exactly.

Pure accounting: the scheduler says what each thread holds when threads start and stop, nothing is said in between.
Between two such moments every thread only grows, so the largest values stand right before a thread lets go.

Source: the definitions in docs/statistics.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """What one live thread has in the KV cache at one engine step."""

    thread: int
    num_cached: int
    """Leading positions of its path whose keys and values are cached."""
    block_ids: Sequence[int]
    """The blocks that hold them."""


@dataclass(slots=True)
class Receipt:
    """Collects one request's figures; `branches[t]` says where thread t leaves its parent's path."""

    num_prompt_tokens: int
    branches: list[tuple[int, int]]
    """Per thread: its parent's number and the length of the path they share, [Fork] included. The root: (0, 0)."""
    peak_cached_tokens: int = 0
    peak_blocks: int = 0
    attended_tokens: int = 0
    max_width: int = 1
    preemptions: int = 0
    recomputed_tokens: int = 0
    fork_prefill_tokens: int = 0
    copied_forks: int = 0
    """Children that found everything before [Fork] in the cache."""

    def observe(self, holdings: Iterable[Holding]) -> None:
        """Take the live threads of one engine step into the peaks."""
        held = list(holdings)
        self.peak_cached_tokens = max(self.peak_cached_tokens, distinct_positions(self.branches, held))
        self.peak_blocks = max(self.peak_blocks, len({block for holding in held for block in holding.block_ids}))

    def sampled(self, num_before: int, num_tokens: int) -> None:
        """Count `num_tokens` sampled behind `num_before` positions of their path."""
        self.attended_tokens += attended(num_before, num_tokens)

    def stats(self, num_output_tokens: int, num_forks: int, num_steps: int) -> dict[str, int]:
        prompt, output = self.num_prompt_tokens, num_output_tokens
        return {
            "threads": len(self.branches),
            "forks": num_forks,
            "max_width": self.max_width,
            "steps": num_steps,
            "peak_cached_tokens": self.peak_cached_tokens,
            "peak_blocks": self.peak_blocks,
            "attended_tokens": self.attended_tokens,
            "sequential_peak_tokens": prompt + output,
            "sequential_attended_tokens": output * prompt + output * (output + 1) // 2,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "fork_prefill_tokens": self.fork_prefill_tokens,
            "copied_forks": self.copied_forks,
        }


def attended(num_before: int, num_tokens: int) -> int:
    """Key positions that `num_tokens` behind `num_before` attend to: each to its own 1-based path position."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


def distinct_positions(branches: Sequence[tuple[int, int]], holdings: Sequence[Holding]) -> int:
    """Distinct token positions of the tree that live threads hold, a shared prefix counted once.

    A thread's own segment of the tree starts where it leaves its parent. How far into it anybody reaches is the
    thread's own cached length, or the branching point of a live descendant, whichever is larger. Children have larger
    numbers than their parents, so one pass from the last thread to the first carries every reach upwards.
    """
    reach = [0] * len(branches)
    for holding in holdings:
        reach[holding.thread] = holding.num_cached
    total = 0
    for thread in range(len(branches) - 1, -1, -1):
        parent, shared = branches[thread]
        total += max(0, reach[thread] - shared)
        if thread:
            reach[parent] = max(reach[parent], min(reach[thread], shared))
    return total
