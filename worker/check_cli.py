"""The command `forq check`."""

from pathlib import Path
from typing import Any

import click

from jobs.console import print_json, print_table, progress
from jobs.context import open_service
from jobs.input_options import input_options, read_templates
from jobs.remote.location import Location


@click.command()
@input_options
@click.option("--tokens-per-second", type=float, metavar="F", help="For the ETA.  [default: as the last job ran]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    file: Location,
    model: str | None,
    template: Path | None,
    system: Path | None,
    turn: tuple[Path, ...],
    max_tokens: int | None,
    tokens_per_second: float | None,
    as_json: bool,
    **columns: Any,
) -> int:
    """Dry run: count the prompts' tokens, find the rows that cannot run, and say whether the model can fork.

    Nothing is stored and no engine is started. Exit code 1 if any row would fail. `output_tokens_at_most` holds for
    forked answers too: it bounds all threads of an answer together.

    \b
    Example:
      forq check questions.parquet --model smollm2-135m
    """
    from jobs.errors import BadInput
    from jobs.remote.files import input_file
    from jobs.service import measured_tokens_per_s
    from worker.check import check_file

    if tokens_per_second is not None and not tokens_per_second > 0:
        raise BadInput(f"--tokens-per-second is {tokens_per_second}: it must be above 0")
    columns.update(read_templates(template, system, turn))
    with open_service() as (settings, database), progress() as advance:
        alias = model or settings.default_model
        settings.model(alias)
        rate = tokens_per_second or measured_tokens_per_s(database, alias)
        with input_file(settings, file, advance) as path:
            report = check_file(
                settings, alias, path, max_tokens=max_tokens, columns=columns,
                say=lambda line: click.echo(line, err=True), progress=advance,
            )  # fmt: skip
        report["file"] = str(file)
    report["tokens_per_second"] = rate
    report["eta_s_at_most"] = round(report["output_tokens_at_most"] / rate, 1) if rate else None
    if as_json:
        print_json(report)
    else:
        _print(report)
    return 1 if report["rows_that_fail"] else 0


def _print(report: dict[str, Any]) -> None:
    shown = {name: value for name, value in report.items() if not name.startswith(("errors", "file"))}
    shown["forks"] = _forks_in_words(report["forks"])
    rows = [[name.replace("_", " "), value] for name, value in shown.items()]
    print_table(None, ["", report["file"]], rows)
    if report["errors"]:
        errors = [[error["row"], error["code"], error["message"]] for error in report["errors"]]
        print_table("rows that would fail", ["row", "code", "why"], errors)


def _forks_in_words(forks: dict[str, Any] | None) -> str:
    if forks is None:
        return "no: the model has no control tokens, use --decoding ar"
    return (
        f"yes: {forks['fork_token']} is token {forks['fork_token_id']}, {forks['child_token']} is token "
        f"{forks['child_token_id']}; at most {forks['max_forks']} forks of an answer, {forks['max_depth']} deep, "
        f"{forks['max_width']} threads at once"
    )
