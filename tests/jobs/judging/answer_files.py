"""Files of answers for tests, and what is read from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.judging.answers import open_answers
from jobs.judging.items import Item
from jobs.judging.preparing import read_items


def silent(phase: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Found:
    """Items, with what their file says of itself."""

    items: list[Item]
    num_rows: int
    num_unpaired: int
    num_turns: int
    names: list[str]


def items_of(path: Path, kind: Any, names: dict[str, str], limit: int | None = None) -> Found:
    """As for a rubric that uses whatever there is."""
    with open_answers(path, kind, names) as answers:
        found = read_items(answers, answers.names, limit, silent)
        return Found(found.items, found.num_rows, found.num_unpaired, answers.num_turns, answers.names)
