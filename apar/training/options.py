"""What a training run is told. Defaults are the paper's (appendix A, table 5), where it says something."""

from dataclasses import dataclass
from typing import Literal

from apar.training.run_options import RunOptions
from apar.training.vocabulary import CHILD_TEXT, FORK_TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(RunOptions):
    method: Literal["full", "lora"] = "full"
    lr: float = 2e-5
    row_lr: float | None = None
    """Learning rate of the two control rows; None: ten times `lr`."""
    warmup: float = 0.03
    lora_rank: int = 32
    lora_alpha: int | None = None
    """None: twice the rank."""
    distill: float = 0.0
    """Part of each text token's target that is the base's own distribution, instead of the token."""
    structured_share: float = 0.5
    fork_text: str = FORK_TEXT
    child_text: str = CHILD_TEXT
    max_depth: int | None = None
    """Of forks, as the model's config will say; None: the deepest tree trained on."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        self._check_least({"lora_rank": 1, "lora_alpha": 1, "max_depth": 1})
        self._check_positive("row_lr")
        self._check_share(distill=1, structured_share=1)

    @property
    def row_rate(self) -> float:
        return self.row_lr if self.row_lr is not None else 10 * self.lr

    @property
    def alpha(self) -> int:
        return self.lora_alpha or 2 * self.lora_rank
