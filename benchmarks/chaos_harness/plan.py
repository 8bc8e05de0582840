"""What the harness tells its `up` and worker processes: a file under FORQ_HOME, since forq's environment is strict."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODEL = "chaos"


@dataclass(frozen=True)
class Plan:
    engine: str
    """`fake` or `real`."""
    workers: int
    latency_s: tuple[float, float]
    """Of the fake engine's answers, from and to."""
    rows_in_flight: int
    sabotage: str | None = None
    """`fence`: the workers' writes are not fenced. The harness must notice."""

    def save(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> "Plan":
        facts: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        return Plan(**{**facts, "latency_s": tuple(facts["latency_s"])})


def folder_in(home: Path) -> Path:
    """Plan, journal and failpoints of a run."""
    return home / "chaos"
