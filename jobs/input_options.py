"""The flags that say how a file's rows become prompts; `submit` and `check` take the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jobs.errors import BadInput
from jobs.remote.location import LOCATION

_OPTIONS = (
    click.argument("file", type=LOCATION),
    click.option("--model", metavar="ALIAS", help="Which configured model answers.  [default: the configured default]"),
    click.option("--prompt-column", metavar="C", help="Column of prompts.  [default: prompt]"),
    click.option("--messages-column", metavar="C", help="Column of conversations.  [default: messages]"),
    click.option(
        "--template", metavar="T.j2", type=click.Path(path_type=Path),
        help="Jinja template over the columns.",
    ),
    click.option(
        "--system", metavar="S.j2", type=click.Path(path_type=Path),
        help="Jinja template of a system message.",
    ),
    click.option(
        "--turn", metavar="T.j2", type=click.Path(path_type=Path), multiple=True,
        help="Jinja template of a later turn, asked after the answer before it; may be given several times.",
    ),
    click.option("--id-column", metavar="C", help="Column that names the rows."),
    click.option("--max-tokens", type=int, metavar="N", help="Longest answer, in tokens.  [default: the model's]"),
)  # fmt: skip


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add FILE, the model and the mapping to a command; read the templates with `read_templates`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_templates(template: Path | None, system: Path | None, turn: tuple[Path, ...]) -> dict[str, Any]:
    """The texts of the templates that were named, as `jobs.rows.make_mapping` and `SubmitOptions` take them.

    Raises:
        BadInput: a file cannot be read as UTF-8 text.
    """
    return {
        "template": None if template is None else read_template(template),
        "system": None if system is None else read_template(system),
        "turn": tuple(read_template(path) for path in turn),
    }


def read_template(path: Path) -> str:
    """Raises BadInput: the file cannot be read as UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"template {path} cannot be read: {why}; give the name of a file that holds it") from None
