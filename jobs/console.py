"""What the commands print: JSON, tables, and progress that is a bar on a terminal and plain lines elsewhere."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

PLAIN_PROGRESS_S = 5.0
"""Off a terminal a progress line is printed at most this often."""

Advance = Callable[[str, int, int], None]


_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= dict.fromkeys([*range(0x7F, 0xA0), 0xFFFE, 0xFFFF], 0xFFFD)


def without_controls(text: str) -> str:
    """Text that moves no cursor and that XML can hold: control characters become their pictures (␛)."""
    return text.translate(_CONTROLS)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=None))


@contextlib.contextmanager
def progress(enabled: bool = True) -> Iterator[Advance]:
    """Yield `advance(phase, done, total)`; progress goes to stderr, so that stdout stays data."""
    if not enabled:
        yield lambda phase, done, total: None
    elif sys.stderr.isatty():
        yield from _bars()
    else:
        yield from _lines()


def _bars() -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield advance


def _lines() -> Iterator[Advance]:
    last: dict[str, tuple[float, int]] = {}

    def advance(phase: str, done: int, total: int) -> None:
        at, shown = last.get(phase, (-PLAIN_PROGRESS_S, -1))
        now = time.monotonic()
        if done != shown and (now - at >= PLAIN_PROGRESS_S or done == total):
            last[phase] = (now, done)
            click.echo(f"{phase}: {done} of {total}", err=True)

    yield advance


def print_table(title: str | None, columns: list[str], rows: list[list[Any]]) -> None:
    """A table on a terminal, tab-separated lines elsewhere. Cells are text: no markup is read from them."""
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join("" if cell is None else str(cell) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    Console().print(table)
