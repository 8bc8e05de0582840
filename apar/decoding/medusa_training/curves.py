"""The curves of a run of Medusa heads: loss by step, and how often each head's best guesses hold."""

from pathlib import Path
from typing import Any

from apar.files import replacing


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Write them as PNG, from the lines of the run's log."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line for line in lines if "loss" in line]
    held_out = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_ylabel("loss per label (nats)")
    below.set_ylabel("labels guessed, held out")
    below.set_xlabel("steps")
    below.set_ylim(-0.02, 1.02)
    for head in range(len(steps[0]["losses"]) if steps else 0):
        name, color = f"head {head + 1}", f"C{head}"
        above.plot(
            [line["step"] for line in steps], [line["losses"][head] for line in steps], color=color, linewidth=0.8,
            alpha=0.5, label=name,
        )  # fmt: skip
        if held_out:
            at = [step for step, _ in held_out]
            above.plot(
                at, [figures[head]["loss"] for _, figures in held_out], color=color, marker="o",
                label=f"{name}, held out",
            )  # fmt: skip
            for key, style in (("top1", "-"), ("top5", "--")):
                shares = [figures[head][key] for _, figures in held_out]
                below.plot(at, shares, style, color=color, marker="o", label=f"{name}, {key}")
    for axes in (above, below):
        if axes.lines:
            axes.legend(frameon=False, fontsize="small")
    with replacing(path) as new:
        figure.savefig(new, dpi=120, format="png")
