"""The run's log: one JSON object per line, and the curves drawn from it.

Lines: {"step", "loss", "grad_norm", "lr", "row_lr", "answers", "tokens", "labels", "seconds"} for each step, and
{"step", "held_out": {...}} for each evaluation. `step` counts the steps done; a resumed run drops the lines of steps
that it will do again.
"""

import json
from pathlib import Path
from typing import Any

from apar.files import replacing, write_file


class Log:
    def __init__(self, path: Path, from_step: int) -> None:
        self.path = path
        self.lines = [line for line in self.read(path) if line["step"] <= from_step]
        write_file(path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def write(self, **line: Any) -> None:
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The lines that are there; none without a file."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        read = []
        for line in lines:
            try:
                read.append(json.loads(line))
            except ValueError:  # the line that a crash cut
                break
        return read

    def draw(self, path: Path) -> None:
        """Write the curves as PNG: loss by step, learned and held out, and how sure the model is of [Fork]."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        steps = [line for line in self.lines if "loss" in line]
        held_out = [(line["step"], line["held_out"]) for line in self.lines if "held_out" in line]
        figure = Figure(figsize=(8, 6), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True)
        losses = [line["loss"] for line in steps]
        above.plot([line["step"] for line in steps], losses, color="0.75", linewidth=0.8, label="one step")
        above.plot([line["step"] for line in steps], _smoothed(losses), color="C0", label="mean of 20 steps")
        above.set_ylabel("loss per token (nats)")
        below.set_ylabel("probability of [Fork]")
        below.set_xlabel("steps")
        below.set_ylim(-0.02, 1.02)
        if held_out:
            at = [step for step, _ in held_out]
            above.plot(at, [figures["loss"] for _, figures in held_out], color="C1", marker="o", label="held out")
            for name, label in (("fork_due", "where it is due"), ("fork_not_due", "where it is not")):
                below.plot(at, [figures[name] for _, figures in held_out], marker="o", label=label)
            below.legend(frameon=False)
        above.legend(frameon=False)
        with replacing(path) as new:
            figure.savefig(new, dpi=120, format="png")


def _smoothed(values: list[float], width: int = 20) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) for part in (values[max(0, i + 1 - width) : i + 1],)]
