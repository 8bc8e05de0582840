"""Draws a report: a panel for each figure, a bar for each category."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apar.evaluation.report import CategoryReport

Value = Callable[[CategoryReport], float | None]

_WIDTH_IN = 13.0
_PANEL_IN = 2.0
_BAR_IN = 0.24

_ALONE: list[tuple[str, str, Value]] = [
    ("answers that fork", ".0%", lambda report: report.forking_share),
    ("threads of forking answers", ".1f", lambda report: report.threads_mean_forking),
    ("engine steps / sequential", ".2f", lambda report: report.critical_path),
    ("attended tokens / sequential", ".2f", lambda report: report.attended),
    ("peak cached tokens / sequential", ".2f", lambda report: report.peak_cached),
]
_BESIDE: list[tuple[str, str, Value, Value]] = [
    (
        "tokens per answer",
        ".0f",
        lambda report: report.model.output_tokens_mean,
        lambda report: report.base.output_tokens_mean,
    ),
    (
        "nats per token under the base (shorter: likelier)",
        ".2f",
        lambda report: _negated(report.model.log_likelihood),
        lambda report: _negated(report.base.log_likelihood),
    ),
    ("repeated runs of 4 words", ".3f", lambda report: report.model.repetition, lambda report: report.base.repetition),
    ("answers that loop", ".0%", lambda report: report.model.loop_share, lambda report: report.base.loop_share),
    (
        "answers with an unfinished list",
        ".0%",
        lambda report: report.model.unfinished_list_share,
        lambda report: report.base.unfinished_list_share,
    ),
]


def plot_reports(reports: Sequence[CategoryReport], target: Path, title: str) -> None:
    """Write a PNG. What forking saves stands above, the model's text beside the base's below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [report.category for report in reports]
    height = 2 * (_PANEL_IN + _BAR_IN * len(names))
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels = figure.subplots(2, len(_ALONE), squeeze=False, sharey=True)
    for axes, (name, show, value) in zip(panels[0], _ALONE, strict=True):
        _bars(axes, name, show, [[value(report) for report in reports]])
    for axes, (name, show, of_model, of_base) in zip(panels[1], _BESIDE, strict=True):
        sides = [[of_model(report) for report in reports], [of_base(report) for report in reports]]
        _bars(axes, name, show, sides)
    for row in panels:
        row[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    panels[0][0].invert_yaxis()  # shared: the first category on top of every panel
    model_and_base = panels[1][0].containers
    figure.legend(model_and_base, ["model", "base"], loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    canvas.print_figure(target, format="png", dpi=110)


def _bars(axes: Any, name: str, show: str, sides: Sequence[Sequence[float | None]]) -> None:
    thickness = 0.8 / len(sides)
    for side, values in enumerate(sides):
        places = [i - 0.4 + thickness * (side + 0.5) for i in range(len(values))]
        bars = axes.barh(places, [value or 0.0 for value in values], height=thickness, color=("C0", "0.65")[side])
        axes.bar_label(bars, ["–" if value is None else format(value, show) for value in values], fontsize=6, padding=2)
    axes.set_title(name, fontsize=8)
    longest = max((value or 0.0 for values in sides for value in values), default=0.0)
    axes.set_xlim(0.0, 1.25 * longest or 1.0)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _negated(value: float | None) -> float | None:
    return None if value is None else -value
