"""Draws the APAR paper's Figure 4 (speed per category) and the PTD paper's Figure 6 (width and depth)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decoding.contenders import parse

PTD_WIDTH, PTD_DEPTH = 4, 6
"""What `ptd` means without settings."""


def plot_categories(rows: Sequence[dict[str, Any]], target: Path, title: str) -> None:
    """Tokens per second and tokens per forward of every decoder, by category."""
    decoders = list(dict.fromkeys(row["decoder"] for row in rows))
    categories = list(dict.fromkeys(row["category"] for row in rows))
    figure, canvas = _figure(title, (2 + 1.3 * len(categories), 7))
    for axes, (key, label) in zip(
        figure.subplots(2, 1, sharex=True), (("tokens_per_s", "tokens per second"), ("de", "tokens per forward (DE)")),
        strict=True,
    ):  # fmt: skip
        thickness = 0.8 / len(decoders)
        for place, decoder in enumerate(decoders):
            values = {row["category"]: row[key] for row in rows if row["decoder"] == decoder}
            xs = [i - 0.4 + thickness * (place + 0.5) for i in range(len(categories))]
            bars = axes.bar(xs, [values.get(category, 0.0) for category in categories], thickness, label=decoder)
            axes.bar_label(bars, fmt="%.3g", fontsize=5, rotation=90, padding=2)
        axes.set_ylabel(label, fontsize=8)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(len(categories)), categories, fontsize=8)
    axes.legend(fontsize=7, ncols=len(decoders), frameon=False, loc="upper left")
    canvas.print_figure(target, format="png", dpi=110)


def plot_sweep(rows: Sequence[dict[str, Any]], target: Path, title: str) -> bool:
    """HR, AL, DE and speed of every width (at depth 6) and depth (at width 4); False if there are no two to compare."""
    points = []
    for row in rows:
        contender = parse(row["decoder"])
        if contender.name == "ptd" and row["category"] == "all":
            points.append((contender.setting("width") or PTD_WIDTH, contender.setting("depth") or PTD_DEPTH, row))
    sweeps = {
        "width w, at depth 6": sorted(((w, row) for w, d, row in points if d == PTD_DEPTH), key=lambda point: point[0]),
        "depth d, at width 4": sorted(((d, row) for w, d, row in points if w == PTD_WIDTH), key=lambda point: point[0]),
    }
    sweeps = {label: sweep for label, sweep in sweeps.items() if len(sweep) > 1}
    if not sweeps:
        return False
    figure, canvas = _figure(title, (4.2 * len(sweeps), 6))
    keys = (("hr", "HR"), ("al", "AL"), ("de", "tokens per forward (DE)"), ("tokens_per_s", "tokens per second"))
    panels = figure.subplots(len(keys), len(sweeps), squeeze=False)
    for column, (label, sweep) in enumerate(sweeps.items()):
        for axes, (key, name) in zip(panels[:, column], keys, strict=True):
            axes.plot([place for place, _ in sweep], [row[key] for _, row in sweep], marker="o")
            axes.set_ylabel(name, fontsize=7)
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1, column].set_xlabel(label, fontsize=8)
    canvas.print_figure(target, format="png", dpi=110)
    return True


def _figure(title: str, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)
    return figure, FigureCanvasAgg(figure)
