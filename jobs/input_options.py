"""The flags that say how a file's rows become prompts; `submit` and `check` take the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jobs.errors import BadInput

_OPTIONS = (
    click.argument("file", type=click.Path(path_type=Path)),
    click.option("--model", metavar="ALIAS", help="Which configured model answers.  [default: the configured default]"),
    click.option("--prompt-column", metavar="C", help="Column of prompts.  [default: prompt]"),
    click.option("--messages-column", metavar="C", help="Column of conversations.  [default: messages]"),
    click.option(
        "--template", metavar="T.j2", type=click.Path(path_type=Path),
        help="Jinja template over the columns.",
    ),
    click.option("--id-column", metavar="C", help="Column that names the rows."),
    click.option("--max-tokens", type=int, metavar="N", help="Longest answer, in tokens.  [default: the model's]"),
)  # fmt: skip


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add FILE, the model and the mapping to a command; read the template with `read_template`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_template(path: Path | None) -> str | None:
    """Raises BadInput: the file cannot be read as UTF-8 text."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"template {path} cannot be read: {error}") from None
