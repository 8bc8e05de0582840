"""A report as tables and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import store
from jobs.judging.items import TOTAL

SCORE_COLUMNS = ["model", "category", "turn", "rows", "judged", "mean", "95 % interval", "expected"]
WIN_COLUMNS = ["model A", "model B", "category", "turn", "pairs", "A wins", "B wins", "ties", "null", "flipped",
               "A's win rate", "95 % interval"]  # fmt: skip
_DPI = 120


def table_of(kind: str, judge: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of one judge's table."""
    if kind == "pairwise":
        return WIN_COLUMNS, [
            [row["model_a"], row["model_b"], row["category"], row["turn"], row["pairs"], row["wins_a"], row["wins_b"],
             row["ties"], row["null"], row["flipped"], _figure(row["win_rate_a"]), _interval(row)]
            for row in judge["wins"]
        ]  # fmt: skip
    return SCORE_COLUMNS, [
        [row["model"], row["category"], row["turn"], row["rows"], row["n"], _figure(row["mean"]), _interval(row),
         _figure(row["expected_score"])]
        for row in judge["scores"]
    ]  # fmt: skip


def matrix_of(judge: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Win rates of the row's model against the column's, over all categories, and over all its pairs."""
    models = [row["model"] for row in judge["models"]]
    rates: dict[tuple[str, str], float] = {}
    for row in judge["wins"]:
        is_total = row["category"] == TOTAL and row["turn"] is None
        if is_total and row["win_rate_a"] is not None and row["model_a"] != row["model_b"]:
            rates[row["model_a"], row["model_b"]] = row["win_rate_a"]
            rates[row["model_b"], row["model_a"]] = 1 - row["win_rate_a"]
    rows = [
        [row["model"], *(_figure(rates.get((row["model"], other))) for other in models), _figure(row["mean"]),
         _interval(row)]
        for row in judge["models"]
    ]  # fmt: skip
    return ["win rate of", *(f"against {model}" for model in models), "all pairs", "95 % interval"], rows


def summary_of(kind: str, judge: dict[str, Any]) -> list[str]:
    """What of a judge stands above the table."""
    lines = [
        f"judge {judge['judge']}: {judge['total']} verdicts asked for, {judge['judged']} read, {judge['null']} null, "
        f"{judge['failed']} failed"
    ]
    for name, counts in (("null", judge["problems"]), ("failed", judge["errors"])):
        if counts:
            lines.append(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    cache = judge["prefix_cache"]
    if cache["hit_rate"] is not None:
        lines.append(
            f"prefix cache: {cache['cached_tokens']} of {cache['prompt_tokens']} prompt tokens "
            f"({100 * cache['hit_rate']:.1f} %)"
        )
    if kind == "pairwise" and judge["flip_rate"] is not None:
        lines.append(
            f"flips: {judge['flipped']} of {judge['pairs_judged']} pairs ({100 * judge['flip_rate']:.1f} %), "
            f"{judge['reversed']} of them to the other model"
        )
        bias = judge["position_bias"]
        if bias["first_place_share"] is not None:
            lines.append(f"first place: {100 * bias['first_place_share']:.1f} % of {bias['decided']} decided verdicts")
    return lines


def agreement_rows(report: dict[str, Any]) -> list[list[Any]]:
    return [
        [*found["judges"], found["n"], _figure(found["same_share"]), _figure(found["kappa"])]
        for found in report["agreement"]
    ]


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw means or win rates with their intervals, a panel per judge, and write it as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pairwise = report["kind"] == "pairwise"
    judges = report["judges"]
    panels = [[row for row in judge["wins" if pairwise else "scores"] if row["turn"] is None] for judge in judges]
    categories = list(dict.fromkeys(row["category"] for rows in panels for row in rows))
    series = list(dict.fromkeys(_series(row, pairwise) for rows in panels for row in rows))
    height = 1.2 + len(judges) * (0.8 + 0.22 * max(1, len(categories) * len(series)))
    figure = Figure(figsize=(9, min(height, 60)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(judges), 1, squeeze=False)[:, 0]
    for axis, judge, rows in zip(axes, judges, panels, strict=True):
        _panel(axis, rows, categories, series, pairwise)
        # Never as a formula, here and below: what users call things may hold a $.
        axis.set_title(f"judge: {judge['judge']}", fontsize=10, loc="left", parse_math=False)
        if pairwise:
            axis.set_xlim(0, 1)
            axis.axvline(0.5, color="0.6", linewidth=0.8)
        else:
            low, high = report["scale"]
            axis.set_xlim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    axes[-1].set_xlabel("win rate, ties half" if pairwise else "mean score")
    temporary = store.temporary_beside(path)
    try:
        figure.savefig(temporary, dpi=_DPI, format="png")
        store.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _panel(
    axis: Any, rows: Sequence[dict[str, Any]], categories: Sequence[str], series: Sequence[str], pairwise: bool
) -> None:
    step = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        mine = {row["category"]: row for row in rows if _series(row, pairwise) == name}
        places, means, below, above = [], [], [], []
        for place, category in enumerate(categories):
            row = mine.get(category)
            mean = None if row is None else row["win_rate_a" if pairwise else "mean"]
            if row is None or mean is None:
                continue
            places.append(place + (number - (len(series) - 1) / 2) * step)
            means.append(mean)
            below.append(0.0 if row["low"] is None else max(0.0, mean - row["low"]))
            above.append(0.0 if row["high"] is None else max(0.0, row["high"] - mean))
        axis.errorbar(means, places, xerr=[below, above], fmt="o", markersize=4, capsize=2, linewidth=1, label="-")
    axis.set_yticks(range(len(categories)), categories, parse_math=False)
    axis.invert_yaxis()
    axis.grid(axis="x", color="0.9")
    legend = axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for text, name in zip(legend.get_texts(), series, strict=True):
        text.set_parse_math(False)
        text.set_text(name)  # only now: as a label, one that begins with _ would not be shown


def _series(row: dict[str, Any], pairwise: bool) -> str:
    return f"{row['model_a']} against {row['model_b']}" if pairwise else str(row["model"] or "answers")


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _interval(row: dict[str, Any]) -> str | None:
    return None if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
