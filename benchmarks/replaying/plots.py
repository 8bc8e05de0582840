"""Draws the paper's figure 5: throughput over cache, latency over concurrency. PNG, without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.replaying.projection import Point

_COLOURS = {"stock": "#7a7a7a", "apar": "#c2410c"}
_LABELS = {"stock": "vLLM", "apar": "vLLM, forking"}


def draw_curves(
    file: Path, title: str, cache_label: str, cache: Sequence[float], curves: Mapping[str, Sequence[Point]]
) -> Path:
    """Two panels; `curves` has one point per entry of `cache` for each of "stock" and "apar"."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for side, points in curves.items():
        style = {"color": _COLOURS[side], "label": _LABELS[side], "marker": "o"}
        left.plot(cache, [point.tokens_per_s for point in points], **style)
        by_concurrency = sorted(points, key=lambda point: point.concurrency)
        right.plot(
            [point.concurrency for point in by_concurrency], [point.ms_per_token for point in by_concurrency], **style
        )
    left.set(xlabel=cache_label, ylabel="throughput, answer tokens/s", ylim=(0, None), xlim=(0, None))
    right.set(xlabel="requests running at once, mean", ylabel="latency, ms per answer token", ylim=(0, None))
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file
