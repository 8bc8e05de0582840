"""The figures of one budget, and of the projection, from both sides' outcomes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.replaying.engine import Outcome
from benchmarks.replaying.limits import Limits
from benchmarks.replaying.projection import Gpu, Point, latency_at, share_of_peak


@dataclass(frozen=True)
class Pair:
    """All runs of one budget, in the order they were made."""

    kv_blocks: int
    stock: list[Outcome]
    apar: list[Outcome]


def measured_line(pair: Pair, bounds: Limits) -> dict[str, Any]:
    """One JSON line; the keys are a contract. Ratios are stock over forked: above 1, forking is faster."""
    stock_s = median(outcome.seconds for outcome in pair.stock)
    apar_s = median(outcome.seconds for outcome in pair.apar)
    stock, apar = pair.stock[0].log, pair.apar[0].log
    return {
        "kv_blocks": pair.kv_blocks,
        "stock_s": round(stock_s, 3),
        "apar_s": round(apar_s, 3),
        "ratio": round(stock_s / apar_s, 3),
        "stock_steps": stock.num_steps,
        "apar_steps": apar.num_steps,
        "step_ratio": round(stock.num_steps / apar.num_steps, 3),
        "stock_preemptions": stock.preemptions,
        "apar_preemptions": apar.preemptions,
        "stock_recomputed": stock.recomputed_tokens,
        "apar_recomputed": apar.recomputed_tokens,
        "fork_prefill_tokens": apar.fork_prefill_tokens,
        **{name: round(value, 4) for name, value in asdict(bounds).items()},
    }


def projected_report(
    gpu: Gpu, concurrency: int, shares: Sequence[float], stock: Sequence[Point], apar: Sequence[Point]
) -> dict[str, Any]:
    """Gains at each cache share, and where forking reaches stock's best throughput (the paper: one fifth)."""
    lines = []
    for share, before, after in zip(shares, stock, apar, strict=True):
        same = latency_at(before.concurrency, apar)
        lines.append(
            {
                "share": share,
                "throughput_gain": round(after.tokens_per_s / before.tokens_per_s - 1, 3),
                "latency_saving": round(1 - after.ms_per_token / before.ms_per_token, 3),
                "latency_saving_at_equal_concurrency": None
                if same is None
                else round(1 - same / before.ms_per_token, 3),
                "stock": asdict(before),
                "apar": asdict(after),
            }
        )
    reached = share_of_peak(shares, [p.tokens_per_s for p in stock], [p.tokens_per_s for p in apar])
    return {
        "gpu": asdict(gpu),
        "concurrency": concurrency,
        "share_of_stock_peak": None if reached is None else round(reached, 3),
        "shares": lines,
    }
