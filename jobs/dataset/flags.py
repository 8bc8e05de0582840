"""The flags of `forq export` that make a data set, and what they and a stored recipe say together."""

from collections.abc import Callable
from typing import Any

import click
from pydantic import ValidationError

from jobs.console import print_table
from jobs.dataset.options import ExportOptions
from jobs.errors import BadInput
from jobs.faults import should_be

FLAGS = (
    click.option("--column", metavar="C", multiple=True,
                 help="Keep this column beside the conversation; several times for more."),
    click.option("--finish-reason", type=click.Choice(["stop", "length"]), multiple=True,
                 help="Only answers that ended so, in every turn."),
    click.option("--min-chars", type=int, metavar="N", help="Only answers of at least N characters."),
    click.option("--max-chars", type=int, metavar="N", help="Only answers of at most N characters."),
    click.option("--min-tokens", type=int, metavar="N", help="Only answers of at least N tokens."),
    click.option("--max-tokens", type=int, metavar="N", help="Only answers of at most N tokens."),
    click.option("--match", metavar="REGEX", multiple=True, help="Only answers in which this is found."),
    click.option("--no-match", metavar="REGEX", multiple=True, help="Only answers in which this is not found."),
    click.option("--dedup", type=click.Choice(["exact", "near"]),
                 help="Keep the first of answers that are the same, or nearly the same."),
    click.option("--dedup-on", type=click.Choice(["answer", "conversation"]),
                 help="What is compared.  [default: answer]"),
    click.option("--near-threshold", type=float, metavar="F",
                 help="How alike is nearly the same: Jaccard similarity of shingles.  [default: 0.8]"),
    click.option("--near-shingles", type=click.Choice(["words", "chars"]),
                 help="Runs of 3 words or of 5 characters.  [default: words]"),
    click.option("--test-share", type=float, metavar="F",
                 help="Part of the first questions whose conversations go to a test file, above 0, below 1."),
    click.option("--no-recipe", is_flag=True, help="Do not begin with what the job's recipe says about the export."),
)  # fmt: skip
_DICT = dict[str, Any]


def dataset_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to a command; what was given goes to `options_said`."""
    for flag in reversed(FLAGS):
        command = flag(command)
    return command


def options_said(base: ExportOptions, said: _DICT) -> ExportOptions:
    """The flags that were given, over what the recipe says.

    Raises:
        BadInput: a value is out of range.
    """
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    try:
        return ExportOptions.model_validate({**base.model_dump(), **given})
    except ValidationError as error:
        raise BadInput("; ".join(_fault(fault) for fault in error.errors())) from None


def print_counts(counts: _DICT) -> None:
    """What became of the answers, step by step; a step that took none is left out."""
    rows = [["rows", counts["rows"]]]
    rows += [[name.replace("_", " "), counts[name]] for name in ("rows_failed", "rows_cancelled", "rows_waiting")]
    rows += [["answers", counts["answers"]]]
    rows += [[f"removed: {name.replace('_', ' ')}", number] for name, number in counts["removed"].items()]
    rows += [["train", counts["train"]], ["test", counts["test"]], ["written", counts["written"]]]
    always = ("rows", "answers", "written")
    print_table(None, ["step", "number"], [row for row in rows if row[1] or row[0] in always])


def _fault(fault: Any) -> str:
    if not fault["loc"]:  # of several together
        return should_be(fault)
    flag = "--" + str(fault["loc"][0]).replace("_", "-")
    return f"{flag} is {fault['input']}: it should be {should_be(fault)}"
