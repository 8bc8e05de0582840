"""Commands of the decoding library: `data`. Heavy modules are imported where they are used."""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from apar.errors import AparError, InputError


def at_the_edge(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn this room's errors into one line on stderr and an exit code: 2 for bad input, 1 for all else."""

    @functools.wraps(command)
    def translated(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except AparError as error:
            click.echo(f"forq: {error}", err=True)
            click.get_current_context().exit(2 if isinstance(error, InputError) else 1)

    return translated


@click.group()
def data() -> None:
    """Make training data from answers.

    \b
    Example:
      forq data extract answers.parquet trees.parquet --rules markdown --report
    """


@data.command()
@click.argument("source", metavar="IN.parquet", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT.parquet", type=click.Path(path_type=Path))
@click.option("--rules", type=click.Choice(["paper", "markdown"]), default="markdown", show_default=True,
              help="paper: ordered lists with colons, paragraphs; markdown: all that Markdown structures.")  # fmt: skip
@click.option("--prompt-column", default="prompt", show_default=True, metavar="C", help="The column of prompts.")
@click.option("--response-column", default="response", show_default=True, metavar="C", help="The column of answers.")
@click.option("--min-points", type=int, default=3, show_default=True, metavar="N",
              help="Forks below which an answer is no tree.")  # fmt: skip
@click.option("--min-detail-chars", type=int, default=10, show_default=True, metavar="N",
              help="A detail shorter than this stays with its head.")  # fmt: skip
@click.option("--max-depth", type=int, default=1, show_default=True, metavar="N",
              help="Levels that fork; with 1, a list within a detail does not.")  # fmt: skip
@click.option("--code", type=click.Choice(["never", "outside", "whole"]), default="never", show_default=True,
              help="Trees of answers with code. never: none; outside: if no detail holds code; whole.")  # fmt: skip
@click.option("--keep-dropped", is_flag=True, help="Write dropped answers too, without kind and nodes.")
@click.option("--processes", type=int, metavar="N", help="Worker processes.  [default: all cores]")
@click.option("--report", is_flag=True, help="Print a table of every kind and reason.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@at_the_edge
def extract(source: Path, target: Path, rules: Any, prompt_column: str, response_column: str, keep_dropped: bool,
            processes: int | None, report: bool, as_json: bool, **limits: Any) -> None:  # fmt: skip
    """Turn the answers of IN.parquet into paragraph trees and negatives.

    OUT.parquet keeps the input's columns and adds kind, reason and nodes. A tree's nodes, read in order, give the
    answer back byte for byte. Answers with structure that cannot be used are left out: as negatives they would teach a
    model not to fork.

    \b
    Example:
      forq data extract answers.parquet trees.parquet --rules markdown --report
    """
    from apar.extraction.files import extract_file
    from apar.extraction.options import Options

    with _progress("extracted") as advance:
        result = extract_file(
            source,
            target,
            rules,
            Options(**limits),
            prompt_column=prompt_column,
            response_column=response_column,
            keep_dropped=keep_dropped,
            num_processes=processes,
            advance=advance,
        )
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    if report:
        rows = [[outcome, reason, str(count), f"{share:.1%}"] for outcome, reason, count, share in result.rows()]
        _print_table(["outcome", "reason", "rows", "share"], rows)
    if report or sys.stdout.isatty():
        click.echo(
            f"{result.num_structured} trees, {result.num_negatives} negatives, {result.num_dropped} dropped "
            f"of {result.num_rows} answers"
        )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal, tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            click.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in ("rows", "share") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
