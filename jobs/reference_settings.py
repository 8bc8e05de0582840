"""The table `[models.<alias>.reference]`: what the reference backend needs beside the model itself.

What is not said here, the decoders' own defaults say: `apar` is not imported where jobs are submitted.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class PtdSettings(BaseModel):
    """Progressive Tree Drafting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int | None = Field(default=None, ge=1)
    """Children that a node of the drafted tree gets."""
    depth: int | None = Field(default=None, ge=1)
    """Levels after which the tree steps on."""
    max_nodes: int | None = Field(default=None, ge=2)
    """Drafted and candidate tokens of one thread in one forward."""


class LadeSettings(BaseModel):
    """Lookahead Decoding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int | None = Field(default=None, ge=1)
    ngram: int | None = Field(default=None, ge=3)
    guesses: int | None = Field(default=None, ge=1)


class ReferenceSettings(BaseModel):
    """Where the reference backend runs, and how its decoders draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """`auto`: the first GPU where torch finds one, else the CPU."""
    medusa: Path | None = None
    """A folder of `forq train-medusa`; without one there is no `medusa` and no `apar+medusa`."""
    ptd: PtdSettings = PtdSettings()
    lade: LadeSettings = LadeSettings()
