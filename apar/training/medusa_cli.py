"""`forq train-medusa`. Heavy imports, the decoding room with them, wait until the command runs: `--help` is quick."""

from typing import Any

import click

from apar.cli import at_the_edge
from apar.training.cli import run_flags, shown, steps_or_epochs, tell


@click.command("train-medusa")
@run_flags(
    base="Model folder (Hugging Face layout) that is drafted for.",
    data="Parquet file of prompts and answers, best its own.",
    lr=1e-3,
    lr_help="Learning rate.",
    warmup=0.1,
)
@click.option("--heads", type=int, metavar="N", default=2, show_default=True, help="Tokens to guess ahead.")
@click.option("--layers", type=int, metavar="N", default=2, show_default=True, help="Residual blocks of each head.")
@at_the_edge
def train_medusa(as_json: bool, steps: int | None, epochs: float | None, **options: Any) -> None:
    """Train Medusa heads, which guess a model's next tokens.

    The model itself stays as it is. Heads learn best from the model's own answers; of a model that forks they learn
    from its trees (`forq data extract`). Writes OUT/heads, for `--decoding medusa` and `apar+medusa` and for vLLM's
    own Medusa proposer. Ctrl-C stops with a checkpoint. One GPU, or the CPU.

    \b
    Example:
      forq data extract answers.parquet trees.parquet
      forq train-medusa --base models/forking --data trees.parquet --out run --batch-size 4 --steps 200
    """
    length = steps_or_epochs(steps, epochs)
    from apar.decoding.medusa_training.options import MedusaTrainingOptions
    from apar.decoding.medusa_training.run import train_heads

    with shown() as show:
        result = train_heads(MedusaTrainingOptions(**length, **options), show)
    tell(result, f"heads: {result.heads}", as_json=as_json)


if __name__ == "__main__":
    train_medusa()
