"""What the steps of a run would cost on a GPU, and the two curves of the paper from it.

Receives an `Outcome`; hands on a `Point` per run. Which rows run in which step, how many tokens they bring and how much
context they read comes from the real engine; only the time of a step is modelled:

    step = max(weights / bandwidth, tokens x 2 x parameters / compute)    the matrix products: read or computed
         + rows x row cost                                                sampling and the scheduler's work
         + context tokens x KV bytes per token / bandwidth                attention reads each row's whole path

The defaults are the paper's A100 (80 GB) with a 13B model in 16 bits: 26 GB of weights; 2 (K, V) x 40 layers x 5120 x 2
bytes = 819.2 kB per token; 2,039 GB/s and 312 TFLOP/s, of which 80 % and 60 % are reached; a cache of 0.9 x 80 GB less
the weights. Nothing here is fitted to the paper's curves. Source: figure 5, appendix C.2 (protocol).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import click

from benchmarks.replaying.counting import StepLog
from benchmarks.replaying.engine import Outcome


@dataclass(frozen=True)
class Gpu:
    """What the projection assumes; each value can be given as `--gpu NAME=VALUE`."""

    weights_gb: float = 26.0
    kv_kb_per_token: float = 819.2
    bandwidth_gb_s: float = 2039 * 0.8
    tflops: float = 312 * 0.6
    row_us: float = 50.0
    cache_gb: float = 46.0

    def kv_blocks(self, share: float, block_size: int) -> int:
        """Blocks in this share of the cache."""
        return int(share * self.cache_gb * 1e6 / (self.kv_kb_per_token * block_size))

    def step_s(self, rows: int, tokens: int, context: int) -> float:
        """Seconds of one step. Two bytes per parameter, two operations per parameter and token."""
        read_s = self.weights_gb / self.bandwidth_gb_s
        compute_s = tokens * self.weights_gb * 1e-3 / self.tflops
        attention_s = context * self.kv_kb_per_token * 1e-6 / self.bandwidth_gb_s
        return max(read_s, compute_s) + rows * self.row_us * 1e-6 + attention_s


@dataclass(frozen=True)
class Point:
    """One run: a place on both curves."""

    kv_blocks: int
    tokens_per_s: float
    """Answer tokens: control tokens do not count."""
    ms_per_token: float
    """Mean over requests of the time from the first step to the last, by the answer's length."""
    concurrency: float
    """Mean number of requests that have begun and not ended."""


def gpu_of(pairs: Sequence[str]) -> Gpu:
    """The defaults with `NAME=VALUE` pairs over them. Raises click.BadParameter."""
    known = {field.name for field in fields(Gpu)}
    values = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"{pair!r}: write NAME=NUMBER") from None
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown: {', '.join(sorted(known))}")
    return replace(Gpu(), **values)


def projected_times(log: StepLog, gpu: Gpu) -> list[float]:
    """When each step begins on the GPU, in seconds, and, as the last entry, when all are over."""
    steps = zip(log.rows, log.tokens, log.context, strict=True)
    return list(accumulate((gpu.step_s(*step) for step in steps), initial=0.0))


def measured_times(outcome: Outcome) -> list[float]:
    """The same as the clock of this machine had it."""
    return [*outcome.log.started_s, outcome.seconds]


def point(kv_blocks: int, outcome: Outcome, times: list[float]) -> Point:
    """Steady state only, as in the paper: the first third of the requests is dropped, and the end, when none waits.

    A request's tokens and time count for as much of its life as lies between those two moments.
    """
    lives = [(times[first], times[end]) for first, end in outcome.spans]
    begin = sorted(end for _, end in lives)[len(lives) // 3]
    last_start = max(start for start, _ in lives)
    if last_start <= begin:  # too few requests for a steady state
        begin, last_start = 0.0, times[-1]
    window_s = last_start - begin
    tokens = busy_s = 0.0
    latencies = []
    for (start, end), output in zip(lives, outcome.outputs, strict=True):
        inside_s = min(end, last_start) - max(start, begin)
        if inside_s <= 0:
            continue
        busy_s += inside_s
        tokens += len(output) * inside_s / (end - start)
        latencies.append((end - start) / len(output))
    return Point(kv_blocks, tokens / window_s, 1e3 * sum(latencies) / len(latencies), busy_s / window_s)


def share_of_peak(shares: Sequence[float], stock: Sequence[float], apar: Sequence[float]) -> float | None:
    """The cache share at which APAR's throughput reaches stock's best, between shares by a straight line.

    None: at no share. At the first share already: that share, an upper bound.
    """
    peak = max(stock)
    for index, value in enumerate(apar):
        if value < peak:
            continue
        if index == 0:
            return shares[0]
        below = apar[index - 1]
        return shares[index - 1] + (peak - below) / (value - below) * (shares[index] - shares[index - 1])
    return None


def latency_at(concurrency: float, points: Sequence[Point]) -> float | None:
    """Latency in ms per token at this concurrency, between two points by a straight line; None outside of them."""
    line = sorted((point.concurrency, point.ms_per_token) for point in points)
    index = bisect_left(line, (concurrency, 0.0))
    if index in (0, len(line)):
        return None
    (x0, y0), (x1, y1) = line[index - 1], line[index]
    return y0 + (concurrency - x0) / (x1 - x0) * (y1 - y0)
