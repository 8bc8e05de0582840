"""Rubrics: what a judge is told. TOML files, our own in `rubrics/`, a user's in the same form."""

import re
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template, meta
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.errors import BadInput
from jobs.templates import compile_template, parse_template

Kind = Literal["pointwise", "pairwise", "reference"]
KINDS: tuple[Kind, ...] = ("pointwise", "pairwise", "reference")
MAX_SCORE = 100
DEFAULT_SCALE = (1, 5)
VARIABLES = {
    "pointwise": ("prompt", "response"),
    "reference": ("prompt", "response", "reference"),
    "pairwise": ("prompt", "response_a", "response_b"),
}
"""What a row brings to a rubric of one turn; with two turns, each of `turns` has them."""
_JUDGED = {"pointwise": {"response"}, "reference": {"response"}, "pairwise": {"response_a", "response_b"}}
ALWAYS = ("judged_turn", "reply", "low", "high")
"""What every rubric has beside."""


class _RubricFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    turns: int = Field(default=1, ge=1, le=2)
    scale: tuple[int, int] | None = None
    system: str = ""
    prompt: str = Field(min_length=1)


@dataclass(frozen=True)
class Rubric:
    name: str
    kind: Kind
    num_turns: int
    scale: tuple[int, int]
    """Lowest and highest score; of no use in a pairwise rubric."""
    system: str
    prompt: str
    """Jinja over `VARIABLES`, `ALWAYS` and the file's own columns."""

    def compile(self, names: Collection[str]) -> "CompiledRubric":
        """Check it once, before any row is read.

        Args:
            names: what an item brings to it, columns and variables.

        Raises:
            BadInput: it does not parse, uses what the items do not bring, or shows the judge nothing to judge.
        """
        known = sorted({*names, *ALWAYS})
        said = [(role, source) for role, source in (("system", self.system), ("user", self.prompt)) if source.strip()]
        what = f"rubric {self.name}"
        parts = tuple((role, compile_template(source, known, what)) for role, source in said)
        uses = set[str]().union(*(meta.find_undeclared_variables(parse_template(source, what)) for _, source in said))
        needed = _JUDGED[self.kind] if self.num_turns == 1 else {"turns"}
        if not needed <= uses:
            missing = ", ".join(sorted(needed - uses))
            raise BadInput(
                f"{what} does not show the judge {missing}: write {{{{ {missing.split(', ')[0]} }}}} into it"
            )
        return CompiledRubric(self, parts, frozenset(uses & set(names)))


@dataclass(frozen=True)
class CompiledRubric:
    rubric: Rubric
    _parts: tuple[tuple[str, Template], ...]
    """Roles, and what they say."""
    uses: frozenset[str]
    """Of the names that items bring."""

    def render(self, values: dict[str, Any]) -> list[dict[str, str]]:
        """The judge's conversation. Raises whatever the user's template raises on these values."""
        said = [(role, part.render(values).strip("\n")) for role, part in self._parts]
        # Interned: a million prompts have the same system message.
        return [{"role": role, "content": sys.intern(text) if role == "system" else text} for role, text in said]


def bundled() -> list[str]:
    """Names of our own rubrics."""
    folder = files("jobs.judging") / "rubrics"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_rubric(said: str | None, kind: Kind, num_turns: int, scale: tuple[int, int] | None) -> Rubric:
    """
    Args:
        said: a name of ours, a TOML file, or None for ours of that kind.
        scale: goes before the rubric's own.

    Raises:
        BadInput: there is none of that name, it is not a rubric, or one of another kind.
    """
    name = said or (kind if num_turns == 1 else f"{kind}-two-turn")
    text = _text_of(name)
    try:
        read = _RubricFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"rubric {name} is not valid TOML: {error}") from None
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadInput(f"rubric {name} is refused: {faults}") from None
    if read.kind != kind:
        raise BadInput(f"rubric {name} is {read.kind}, --kind is {kind}: name one of the same kind")
    if read.turns != num_turns:
        raise BadInput(
            f"rubric {name} judges {read.turns} turn(s), the file's rows have {num_turns}: name another rubric"
        )
    chosen = scale or read.scale or DEFAULT_SCALE
    if not 0 <= chosen[0] < chosen[1] <= MAX_SCORE:
        raise BadInput(
            f"the scale is {chosen[0]}-{chosen[1]}: it must begin at 0 or above, rise, and end at {MAX_SCORE} or below"
        )
    return Rubric(Path(name).stem, kind, num_turns, chosen, read.system, read.prompt)


def _text_of(name: str) -> str:
    if name in bundled():
        return (files("jobs.judging") / "rubrics" / f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        raise BadInput(f"there is no rubric {name!r}: use {', '.join(bundled())}, or name a TOML file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"rubric {name} cannot be read: {error}") from None


def parse_scale(text: str) -> tuple[int, int]:
    """Read `1-5`. Raises BadInput."""
    found = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", text)
    if found is None:
        raise BadInput(f"--scale is {text!r}: write the lowest and the highest score, like 1-5")
    return int(found[1]), int(found[2])
