"""`forq train-medusa`. Heavy imports, the decoding room with them, wait until the command runs: `--help` is quick."""

import json
from pathlib import Path
from typing import Any

import click

from apar.cli import at_the_edge
from apar.training.cli import INTERRUPTED, jsonable, shown

_PATH = click.Path(path_type=Path)


@click.command("train-medusa")
@click.option(
    "--base", required=True, type=_PATH, metavar="DIR", help="Model folder (Hugging Face layout) that is drafted for."
)
@click.option(
    "--data", required=True, type=_PATH, metavar="FILE", help="Parquet file of prompts and answers, best its own."
)
@click.option(
    "--out", required=True, type=_PATH, metavar="DIR", help="Where the run lives; the same command goes on there."
)
@click.option("--heads", type=int, metavar="N", default=2, show_default=True, help="Tokens to guess ahead.")
@click.option("--layers", type=int, metavar="N", default=2, show_default=True, help="Residual blocks of each head.")
@click.option("--steps", type=int, metavar="N", help="Batches to learn from.  [default: 2000]")
@click.option("--epochs", type=float, metavar="F", help="Instead of --steps: how often each answer comes, at least.")
@click.option("--lr", type=float, metavar="F", default=1e-3, show_default=True, help="Learning rate.")
@click.option("--batch-size", type=int, metavar="N", default=128, show_default=True, help="Answers per step.")
@click.option("--row-tokens", type=int, metavar="N", default=2048, show_default=True,
              help="Tokens that go through the base at once: memory.")  # fmt: skip
@click.option("--max-tokens", type=int, metavar="N", help="Leave longer answers out.  [default: --row-tokens]")
@click.option("--warmup", type=float, metavar="F", default=0.1, show_default=True,
              help="Part of the steps that warm up.")  # fmt: skip
@click.option("--weight-decay", type=float, metavar="F", default=0.0, show_default=True, help="AdamW's.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True,
              help="Type to compute in.")  # fmt: skip
@click.option("--eval-share", type=float, metavar="F", default=0.02, show_default=True,
              help="Part of the prompts held out.")  # fmt: skip
@click.option("--eval-every", type=int, metavar="N", help="Steps between evaluations.  [default: a tenth of all]")
@click.option("--save-every", type=int, metavar="N", default=100, show_default=True, help="Steps between checkpoints.")
@click.option("--prompt-column", metavar="S", default="prompt", show_default=True, help="Texts, or lists of messages.")
@click.option("--response-column", metavar="S", default="response", show_default=True, help="The answers.")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of sampling.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
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
    if steps is not None and epochs is not None:
        raise click.UsageError("give --steps or --epochs, not both")
    if epochs is None:
        options["steps"] = 2000 if steps is None else steps
    from apar.decoding.medusa_training.options import MedusaTrainingOptions
    from apar.decoding.medusa_training.run import train_heads

    with shown() as show:
        result = train_heads(MedusaTrainingOptions(epochs=epochs, **options), show)
    if as_json:
        click.echo(json.dumps(jsonable(result)))
    if not result.finished:
        click.echo(f"stopped at step {result.step} of {result.steps}; the same command goes on from there", err=True)
        click.get_current_context().exit(INTERRUPTED)
    if not as_json:
        click.echo(f"heads: {result.heads}")


if __name__ == "__main__":
    train_medusa()
