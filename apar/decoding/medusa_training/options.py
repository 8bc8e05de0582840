"""What a training run of Medusa heads is told. Defaults are the paper's (appendix A, table 6), where it has any."""

from dataclasses import dataclass

from apar.training.run_options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTrainingOptions(RunOptions):
    heads: int = 2
    layers: int = 2
    lr: float = 1e-3
    warmup: float = 0.1

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        self._check_least({"heads": 1, "layers": 0})
