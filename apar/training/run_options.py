"""What every training run is told, whatever it trains."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apar.errors import InputError

FREE = frozenset({"out", "save_every"})
"""Options that may differ when a run is resumed: they change nothing about what is trained."""
PATHS = frozenset({"base", "data"})
"""Compared by what they hold, so that a folder may move between two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    base: Path
    data: Path
    out: Path
    steps: int = 2000
    epochs: float | None = None
    """Instead of steps. An epoch is as many answers as it takes for each one to be drawn."""
    lr: float
    batch_size: int = 128
    """Answers per step, on all processes together."""
    row_tokens: int = 2048
    """Tokens that run through the model at once."""
    max_tokens: int | None = None
    """Longer answers, with their prompts, are left out; None: `row_tokens`."""
    warmup: float
    """Part of the steps over which the rates rise."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    eval_share: float = 0.02
    eval_every: int | None = None
    """Steps; None: a tenth of all."""
    save_every: int = 100
    prompt_column: str = "prompt"
    response_column: str = "response"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_least(
            {"steps": 1, "batch_size": 1, "row_tokens": 8, "max_tokens": 8, "eval_every": 1, "save_every": 1,
             "weight_decay": 0, "seed": 0}
        )  # fmt: skip
        self._check_positive("lr", "epochs", "max_grad_norm")
        self._check_share(warmup=1, eval_share=0.5)
        if self.max_tokens is not None and self.max_tokens > self.row_tokens:
            raise InputError(
                f"--max-tokens is {self.max_tokens}, a row holds {self.row_tokens} tokens: "
                "raise --row-tokens or lower it"
            )

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or self.row_tokens

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to go on, but for the files' contents."""
        return {name: value for name, value in asdict(self).items() if name not in FREE | PATHS}

    def _check_least(self, least: Mapping[str, float]) -> None:
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not value >= limit:
                raise InputError(f"{flag(name)} is {value}: use at least {limit:g}")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{flag(name)} is {value}: use a number above 0")

    def _check_share(self, **most: float) -> None:
        for name, limit in most.items():
            value = getattr(self, name)
            if not 0 <= value <= limit:
                raise InputError(f"{flag(name)} is {value}: use 0 to {limit:g}")


def flag(name: str) -> str:
    """How the command line calls an option."""
    return "--" + name.replace("_", "-")
