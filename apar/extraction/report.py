"""What an extraction did: how many answers of each kind, why the others are none, and what forking would save."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from apar.extraction.options import Extraction
from apar.extraction.structure import longest_thread

_LABELS = {"unstructured": "negative", None: "dropped"}


@dataclass(slots=True)
class Report:
    """Counts over all answers of a file."""

    rules: str
    outcomes: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    """By (kind, reason), as `Extraction` has them."""
    num_forks: int = 0
    num_chars: int = 0
    """Of the answers that are trees."""
    num_path_chars: int = 0
    """Of the longest threads of these trees."""

    def count(self, outcome: Extraction) -> None:
        """Add one answer."""
        self.outcomes[outcome.kind, outcome.reason] += 1
        if outcome.kind is None or outcome.kind == "unstructured" or not outcome.nodes:
            return
        self.num_forks += sum(node.first_child is not None for node in outcome.nodes)
        self.num_path_chars += longest_thread(outcome.nodes)
        self.num_chars += outcome.nodes[-1].end

    @property
    def num_rows(self) -> int:
        return self.outcomes.total()

    @property
    def num_structured(self) -> int:
        return sum(count for (kind, _), count in self.outcomes.items() if kind not in (None, "unstructured"))

    @property
    def num_negatives(self) -> int:
        return sum(count for (kind, _), count in self.outcomes.items() if kind == "unstructured")

    @property
    def num_dropped(self) -> int:
        return sum(count for (kind, _), count in self.outcomes.items() if kind is None)

    def rows(self) -> list[tuple[str, str, int, float]]:
        """Outcome, reason, count and share, trees first, then negatives, then dropped answers, each by count."""

        def order(entry: tuple[tuple[str | None, str | None], int]) -> tuple[int, int, str]:
            (kind, reason), count = entry
            return (0 if kind not in _LABELS else 1 if kind else 2), -count, reason or ""

        return [
            (_LABELS.get(kind, f"tree, {kind}"), reason or "", count, count / self.num_rows)
            for (kind, reason), count in sorted(self.outcomes.items(), key=order)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it; shares are of all rows."""
        total = max(1, self.num_rows)
        return {
            "rules": self.rules,
            "rows": self.num_rows,
            "structured": self.num_structured,
            "structured_share": self.num_structured / total,
            "unstructured": self.num_negatives,
            "unstructured_share": self.num_negatives / total,
            "dropped": self.num_dropped,
            "dropped_share": self.num_dropped / total,
            "forks": self.num_forks,
            "forks_per_tree": self.num_forks / max(1, self.num_structured),
            "path_share": self.num_path_chars / max(1, self.num_chars),
            "outcomes": [
                {"kind": kind, "reason": reason, "count": count, "share": count / total}
                for (kind, reason), count in sorted(self.outcomes.items(), key=lambda entry: (-entry[1], str(entry[0])))
            ],
        }
