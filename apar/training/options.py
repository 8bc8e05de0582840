"""What a training run is told. Defaults are the paper's (appendix A, table 5), where it says something."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apar.errors import InputError
from apar.training.vocabulary import CHILD_TEXT, FORK_TEXT

FREE = frozenset({"out", "save_every"})
"""Options that may differ when a run is resumed: they change nothing about what is trained."""
PATHS = frozenset({"base", "data"})
"""Compared by what they hold, so that a folder may move between two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    base: Path
    data: Path
    out: Path
    method: Literal["full", "lora"] = "full"
    steps: int = 2000
    epochs: float | None = None
    """Instead of steps. An epoch is as many answers as it takes for each one to be drawn."""
    lr: float = 2e-5
    row_lr: float | None = None
    """Learning rate of the two control rows; None: ten times `lr`."""
    batch_size: int = 128
    """Answers per step, on all processes together."""
    row_tokens: int = 2048
    """Tokens of the trees that run through the model at once."""
    max_tokens: int | None = None
    """Longer answers, with their prompts, are left out; None: `row_tokens`."""
    warmup: float = 0.03
    """Part of the steps over which the rates rise."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    lora_rank: int = 32
    lora_alpha: int | None = None
    """None: twice the rank."""
    distill: float = 0.0
    """Part of each text token's target that is the base's own distribution, instead of the token."""
    structured_share: float = 0.5
    eval_share: float = 0.02
    eval_every: int | None = None
    """Steps; None: a tenth of all."""
    save_every: int = 100
    prompt_column: str = "prompt"
    response_column: str = "response"
    seed: int = 0
    fork_text: str = FORK_TEXT
    child_text: str = CHILD_TEXT
    max_depth: int | None = None
    """Of forks, as the model's config will say; None: the deepest tree trained on."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "steps": 1, "batch_size": 1, "row_tokens": 8, "max_tokens": 8, "lora_rank": 1, "lora_alpha": 1,
            "eval_every": 1, "save_every": 1, "max_depth": 1, "weight_decay": 0, "seed": 0,
        }  # fmt: skip
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not value >= limit:
                raise InputError(f"{_flag(name)} is {value}: use at least {limit:g}")
        for name in ("lr", "row_lr", "epochs", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{_flag(name)} is {value}: use a number above 0")
        for name in ("warmup", "distill", "structured_share", "eval_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "eval_share" and value > 0.5):
                raise InputError(f"{_flag(name)} is {value}: use 0 to {0.5 if name == 'eval_share' else 1}")
        if self.max_tokens is not None and self.max_tokens > self.row_tokens:
            raise InputError(
                f"--max-tokens is {self.max_tokens}, a row holds {self.row_tokens} tokens: "
                "raise --row-tokens or lower it"
            )

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or self.row_tokens

    @property
    def row_rate(self) -> float:
        return self.row_lr if self.row_lr is not None else 10 * self.lr

    @property
    def alpha(self) -> int:
        return self.lora_alpha or 2 * self.lora_rank

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to go on, but for the files' contents."""
        return {k: v for k, v in asdict(self).items() if k not in FREE | PATHS}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
