"""`forq train`. Heavy imports wait until the command runs, so that `--help` is quick."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from apar.cli import at_the_edge

PLAIN_PROGRESS_S = 10.0
"""Off a terminal a line about the steps is printed at most this often."""
INTERRUPTED = 130
_Command = TypeVar("_Command", bound=Callable[..., Any])


def run_flags(*, base: str, data: str, lr: float, lr_help: str, warmup: float) -> Callable[[_Command], _Command]:
    """The flags of every training run (`run_options.RunOptions`); the words and rates that differ are given."""
    path = click.Path(path_type=Path)
    flags = [
        click.option("--base", required=True, type=path, metavar="DIR", help=base),
        click.option("--data", required=True, type=path, metavar="FILE", help=data),
        click.option("--out", required=True, type=path, metavar="DIR",
                     help="Where the run lives; the same command goes on there after a stop."),
        click.option("--steps", type=int, metavar="N", help="Batches to learn from.  [default: 2000]"),
        click.option("--epochs", type=float, metavar="F",
                     help="Instead of --steps: how often each answer comes, at least."),
        click.option("--lr", type=float, metavar="F", default=lr, show_default=True, help=lr_help),
        click.option("--batch-size", type=int, metavar="N", default=128, show_default=True, help="Answers per step."),
        click.option("--row-tokens", type=int, metavar="N", default=2048, show_default=True,
                     help="Tokens that go through the model at once: memory."),
        click.option("--max-tokens", type=int, metavar="N", help="Leave longer answers out.  [default: --row-tokens]"),
        click.option("--warmup", type=float, metavar="F", default=warmup, show_default=True,
                     help="Part of the steps that warm up."),
        click.option("--weight-decay", type=float, metavar="F", default=0.0, show_default=True, help="AdamW's."),
        click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True,
                     help="Type to compute in."),
        click.option("--eval-share", type=float, metavar="F", default=0.02, show_default=True,
                     help="Part of the prompts held out."),
        click.option("--eval-every", type=int, metavar="N",
                     help="Steps between evaluations.  [default: a tenth of all]"),
        click.option("--save-every", type=int, metavar="N", default=100, show_default=True,
                     help="Steps between checkpoints."),
        click.option("--prompt-column", metavar="S", default="prompt", show_default=True,
                     help="Texts, or lists of messages."),
        click.option("--response-column", metavar="S", default="response", show_default=True, help="The answers."),
        click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of whatever is random."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    ]  # fmt: skip

    def decorate(command: _Command) -> _Command:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return decorate


def steps_or_epochs(steps: int | None, epochs: float | None) -> dict[str, Any]:
    """What a run's options say of its length.

    Raises:
        UsageError: both are given.
    """
    if steps is not None and epochs is not None:
        raise click.UsageError("give --steps or --epochs, not both")
    return {"epochs": epochs} if epochs is not None else {"steps": 2000 if steps is None else steps}


def tell(result: Any, line: str, *, as_json: bool) -> None:
    """Print what came of a run; one that was stopped ends the command with its own exit code."""
    if as_json:
        click.echo(json.dumps(jsonable(result)))
    if not result.finished:
        click.echo(f"stopped at step {result.step} of {result.steps}; the same command goes on from there", err=True)
        click.get_current_context().exit(INTERRUPTED)
    if not as_json:
        click.echo(line)


@click.command()
@run_flags(
    base="Model folder (Hugging Face layout) to start from; its tokenizer has a chat template.",
    data="Parquet file of `forq data extract`.",
    lr=2e-5,
    lr_help="Learning rate; LoRA wants 1e-4 up.",
    warmup=0.03,
)
@click.option("--method", type=click.Choice(["full", "lora"]), default="full", show_default=True, help="What to train.")
@click.option("--row-lr", type=float, metavar="F", help="Rate of the two control tokens' rows.  [default: 10 x --lr]")
@click.option("--lora-rank", type=int, metavar="N", default=32, show_default=True, help="Of the LoRA matrices.")
@click.option("--lora-alpha", type=int, metavar="N", help="LoRA's scale.  [default: 2 x --lora-rank]")
@click.option(
    "--distill",
    type=float,
    metavar="F",
    default=0.0,
    show_default=True,
    help="Part of the base's own distribution in the targets of text; 1 keeps its words best.",
)
@click.option(
    "--structured-share",
    type=float,
    metavar="F",
    default=0.5,
    show_default=True,
    help="Part of each batch that is structured answers.",
)
@click.option("--max-depth", type=int, metavar="N", help="Of forks, for the model's config.  [default: the data's]")
@at_the_edge
def train(as_json: bool, steps: int | None, epochs: float | None, **options: Any) -> None:
    """Teach a model to fork its answers.

    Adds the two control tokens and trains on paragraph trees, structured and unstructured answers in turns. Writes
    an ordinary model folder to OUT/model and, with LoRA, the adapter to OUT/adapter. Ctrl-C stops with a checkpoint.
    Several GPUs: start it with `accelerate launch -m apar.training.cli`.

    \b
    Example:
      forq data extract answers.parquet trees.parquet --rules markdown
      forq train --base models/small --data trees.parquet --out run --method lora --lr 3e-4 --batch-size 16 --steps 200
    """
    length = steps_or_epochs(steps, epochs)
    from apar.training.options import TrainingOptions
    from apar.training.run import is_main_process
    from apar.training.run import train as run

    with shown() as show:
        result = run(TrainingOptions(**length, **options), show)
    if is_main_process():
        tell(result, f"model: {result.model}", as_json=as_json)


def jsonable(result: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(result).items()}


@contextmanager
def shown() -> Iterator[Callable[[Any], None]]:
    """Yield what shows a run's events on stderr: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("training", total=None, figures="", visible=False)

        def show(event: Any) -> None:
            if event.text:
                bar.console.print(event.text, markup=False, highlight=False)
            else:
                bar.update(task, total=event.steps, completed=event.step, figures=_figures(event.figures), visible=True)

        yield show


def _lines() -> Callable[[Any], None]:
    shown_at = -PLAIN_PROGRESS_S

    def show(event: Any) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if event.text:
            click.echo(event.text, err=True)
        elif now - shown_at >= PLAIN_PROGRESS_S or event.step == event.steps:
            shown_at = now
            click.echo(f"step {event.step} of {event.steps}: {_figures(event.figures)}", err=True)

    return show


def _figures(line: dict[str, Any]) -> str:
    return f"loss {line['loss']:.4f}, {line['tokens'] / max(line['seconds'], 1e-9):.0f} tokens/s"


if __name__ == "__main__":
    train()
