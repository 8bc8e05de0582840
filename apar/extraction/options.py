"""What extraction is asked for, and what it says of one answer."""

from dataclasses import dataclass
from typing import Literal

from apar.errors import InputError
from apar.extraction.structure import TreeNode

Rules = Literal["paper", "markdown"]
Kind = Literal["list", "paragraph", "section", "unstructured"]
Code = Literal["never", "outside", "whole"]
RULES: tuple[Rules, ...] = ("paper", "markdown")
CODE: tuple[Code, ...] = ("never", "outside", "whole")
KINDS: tuple[Kind, ...] = ("list", "paragraph", "section", "unstructured")


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of extraction; the defaults of the first two are the paper's (appendix B).

    Raises:
        InputError: if a limit is out of range.
    """

    min_points: int = 3
    """Forks below which an answer is no tree."""
    min_detail_chars: int = 10
    """A detail shorter than this stays with its head."""
    max_depth: int = 1
    """Levels that fork: with 1, what a detail holds stays in the detail."""
    code: Code = "never"
    """What becomes of answers that show code. `never`: no tree, so that a model does not learn to fork in them.
    `outside`: lists and sections may fork if no detail holds code. `whole`: like other answers; code stays whole."""
    max_chars: int = 200_000
    """Longer answers are dropped unread."""

    def __post_init__(self) -> None:
        for name, least in (("min_points", 1), ("min_detail_chars", 1), ("max_depth", 1), ("max_chars", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}: use {least} or more")
        if self.code not in CODE:
            raise InputError(f"code is {self.code!r}: use {', '.join(CODE)}")


@dataclass(frozen=True, slots=True)
class Extraction:
    """One answer's outcome: kept as a tree or as a negative, or dropped (`kind` is None)."""

    kind: Kind | None
    reason: str | None
    """Why it is a negative or was dropped; None for trees."""
    nodes: list[TreeNode] | None
