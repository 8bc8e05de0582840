"""How a bootstrap run is done: one TOML file, whose defaults suit a small model on a small machine."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apar.errors import InputError
from apar.training.options import TrainingOptions
from jobs.errors import BadInput


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answers(_Section):
    """How the base model answers the prompts, and which answers are learnt from."""

    max_tokens: int = Field(default=384, ge=16)
    temperature: float = Field(default=0.4, ge=0)
    """Low: the nearer the answers are to the model's own greedy ones, the less the training changes it."""
    top_p: float = Field(default=0.9, gt=0, le=1)
    seed: int = Field(default=1, ge=0)
    max_repetition: float = Field(default=0.3, ge=0, le=1)
    """An answer is kept up to the first line that repeats more of its word 4-grams than this."""
    min_words: int = Field(default=60, ge=1)
    """An answer that loops or was cut off is learnt from if this much of it is kept."""


class Trees(_Section):
    """Extraction, and which answers without a tree teach not to fork."""

    rules: Literal["markdown", "paper"] = "markdown"
    min_forks: int = Field(default=3, ge=1)
    """Trees with fewer are left out: what the model sees fork is how much it will."""
    max_attended_share: float = Field(default=1.0, gt=0, le=1)
    """Trees whose characters see more of one another than this part of the plain text's are left out: they save
    little."""
    max_plain_words: int = Field(default=120, ge=0)
    """A longer answer in a single block is no example of what cannot be forked, only of what the model did not
    structure: it is left out. Code and maths stay, whatever their length."""


class Report(_Section):
    """The evaluation at the end, on prompts that the training has not seen."""

    rows: int = Field(default=80, ge=1)
    """Taken from the prompts, evenly spread, unless there is a file of its own."""
    max_tokens: int = Field(default=300, ge=16)


class Recipe(_Section):
    answers: Answers = Answers()
    trees: Trees = Trees()
    training: dict[str, Any] = Field(default_factory=dict)
    """Options of `forq train`, by their names."""
    report: Report = Report()

    def training_options(self, base: Path, data: Path, out: Path) -> TrainingOptions:
        """Raises BadInput: an option is unknown or out of range."""
        known = {field.name for field in fields(TrainingOptions)} - {"base", "data", "out"}
        if unknown := sorted(set(self.training) - known):
            raise BadInput(f"[training] of the recipe has no option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        try:
            return TrainingOptions(base=base, data=data, out=out, **self.training)
        except (InputError, TypeError) as error:
            raise BadInput(f"[training] of the recipe: {error}") from None


def read_recipe(path: Path | None) -> Recipe:
    """Raises BadInput: the file is no TOML, or a value is refused; one line that names each."""
    if path is None:
        return Recipe()
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadInput(f"recipe {path} refused: {faults}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"recipe {path} cannot be read: {error}") from None
