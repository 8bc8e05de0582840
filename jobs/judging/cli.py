"""The command `forq judge`."""

from pathlib import Path
from typing import Any

import click

from jobs.console import print_json, print_table, progress
from jobs.context import open_service
from jobs.errors import BadInput


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(["pointwise", "pairwise", "reference"]), required=True,
              help="A score for each answer; the better of two; a score beside a reference.")  # fmt: skip
@click.option("--model", "models", multiple=True, metavar="ALIAS",
              help="The judge; several may be named.  [default: the configured default]")  # fmt: skip
@click.option("--rubric", metavar="R", help="One of our rubrics, or a TOML file.  [default: ours of the kind]")
@click.option("--scale", metavar="L-H", help="Lowest and highest score.  [default: the rubric's, 1-5]")
@click.option("--column", "columns", multiple=True, metavar="ROLE=NAME",
              help="What a column is for, where its name does not say, like prompt=question.")  # fmt: skip
@click.option("--turns", type=click.Choice(["second", "each"]), default="second", show_default=True,
              help="Of conversations of two questions, which answers are judged.")  # fmt: skip
@click.option("--reasons", is_flag=True, help="Ask for a short reason in front of the verdict.")
@click.option("--logprobs", is_flag=True, help="Keep the probabilities of the verdicts, and expected scores.")
@click.option("--unconstrained", is_flag=True, help="Do not let the engine enforce the reply's form.")
@click.option("--inconsistent", type=click.Choice(["tie", "null"]), default="tie", show_default=True,
              help="What a pair counts whose two orders disagree; null: nothing.")  # fmt: skip
@click.option("--no-order", is_flag=True, help="Keep the file's order, instead of one that the prefix cache likes.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Judge the first N rows; of pairs, N questions.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Of the bootstrap behind the intervals.")  # fmt: skip
@click.option("--priority", type=int, default=0, metavar="P", help="Of the jobs; higher goes first.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder of prompts, results and report.  [default: FILE-KIND, here]")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Submit and return; the same command again collects.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="Wait at most S seconds (exit code 1).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def judge(
    file: Path,
    models: tuple[str, ...],
    scale: str | None,
    columns: tuple[str, ...],
    unconstrained: bool,
    no_order: bool,
    out: Path | None,
    no_wait: bool,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Have a model judge the answers in FILE, a Parquet file, and report on its verdicts.

    The verdicts come from a job of this service, so a worker must run. The same command on the same folder goes on
    where it stopped. Columns, rubrics and figures: docs/judging.md.

    \b
    Example:
      forq judge answers.parquet --kind pointwise --model smollm2-135m --out judged
    """
    from jobs.judging import run
    from jobs.judging.options import JudgeOptions, parse_columns
    from jobs.judging.rubrics import parse_scale

    if timeout is not None and not timeout >= 0:
        raise BadInput(f"--timeout is {timeout}: give 0 or more seconds")
    with open_service() as (settings, database):
        chosen = JudgeOptions(
            models=models or (settings.default_model,),
            scale=None if scale is None else parse_scale(scale),
            columns=parse_columns(columns),
            constrained=not unconstrained,
            ordered=not no_order,
            **options,
        )
        folder = out or run.default_folder(file, chosen.kind)
        with progress() as advance:
            begun = run.begin(database, settings, file, chosen, folder, advance)
            if no_wait:
                print_json({"jobs": begun.jobs, "out": str(folder)}) if as_json else _print_jobs(begun.jobs)
                return 0
            if not run.wait(database, begun, advance, lambda line: click.echo(f"forq: {line}", err=True), timeout):
                click.echo(f"forq: not ended after {timeout} s: the same command again goes on waiting", err=True)
                return 1
            report = run.finish(database, settings, file, chosen, begun, advance)
    if as_json:
        print_json(report)
    else:
        _print(report)
        click.echo(f"written to {folder}", err=True)
    return 0


def _print_jobs(jobs: dict[str, str]) -> None:
    for model, job_id in jobs.items():
        click.echo(f"judge {model}: job {job_id}")


def _print(report: dict[str, Any]) -> None:
    from jobs.judging.presenting import agreement_rows, matrix_of, summary_of, table_of

    for judged in report["judges"]:
        for line in summary_of(report["kind"], judged):
            click.echo(line, err=True)
        columns, rows = table_of(report["kind"], judged)
        print_table(f"judge {judged['judge']}, {report['kind']}", columns, rows)
        if report["kind"] == "pairwise":
            print_table(f"judge {judged['judge']}, win rates", *matrix_of(judged))
    if report["agreement"]:
        columns = ["judge", "other judge", "verdicts", "same", "Cohen's kappa"]
        print_table("agreement", columns, agreement_rows(report))
