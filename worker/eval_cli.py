"""The command `forq eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.console import Advance, print_json, print_table, progress, without_controls
from jobs.errors import BadInput, Unavailable
from jobs.settings import KVBudget, Settings, get_settings

if TYPE_CHECKING:
    from apar.evaluation import EvaluatedRow
    from worker.evaluation.answering import Question


@click.command(name="eval")
@click.argument("model")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="P.parquet", help="Questions for both models.")
@click.option("--answers", type=click.Path(path_type=Path), metavar="A.parquet",
              help="Report on the answers of an earlier --out instead: no engine runs.")  # fmt: skip
@click.option("--base", metavar="BASE", help="Alias or folder of the base.  [default: as MODEL names it]")
@click.option("--prompt-column", default="prompt", show_default=True, metavar="C",
              help="Column of prompts; of a list of turns the first is asked.")  # fmt: skip
@click.option("--category-column", metavar="C", help="Column of categories.  [default: category, if there is one]")
@click.option("--max-tokens", type=int, default=300, show_default=True, metavar="N",
              help="Longest answer, all its threads together.")  # fmt: skip
@click.option("--limit", type=int, metavar="N", help="Ask N prompts only, evenly spaced over the file.")
@click.option("--kv-budget", metavar="SIZE",
              help="KV cache of each engine, like '256 MiB'.  [default: the alias's, else 1 GiB on a CPU]")  # fmt: skip
@click.option("--dtype", metavar="[bfloat16|float16|float32]",
              help="What both engines compute in.  [default: the alias's, else the base's own]")  # fmt: skip
@click.option("--no-likelihood", is_flag=True, help="Do not score the answers under the base.")
@click.option("--side-by-side", type=int, default=0, metavar="N", help="Print N prompts with both answers.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Write answers.parquet, report.json and report.png there.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per category.")
def evaluate(model: str, out: Path | None, as_json: bool, side_by_side: int, **options: Any) -> None:
    """Compare MODEL, which forks, with its base: savings per category, and quality without a judge.

    MODEL and BASE are aliases or model folders. Both answer greedily, one engine after the other, with equal options
    and equal KV budgets; the base never forks. Figures are defined in docs/evaluation.md.

    \b
    Example:
      forq eval smollm2-135m-apar --prompts questions.parquet --out evaluation
    """
    from apar.errors import AparError, InputError

    settings = get_settings()
    _check(options, side_by_side)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    try:
        with progress() as advance:
            rows, facts = _rows(settings, model, out, advance, **options)
        _publish(rows, facts, out, as_json, side_by_side)
    except InputError as error:
        raise BadInput(str(error)) from error
    except AparError as error:
        raise Unavailable(str(error)) from error


def _check(options: dict[str, Any], side_by_side: int) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    if (options["prompts"] is None) == (options["answers"] is None):
        raise BadInput("name either --prompts FILE, to generate answers, or --answers FILE, to report on given ones")
    for flag, value, least in (
        ("--max-tokens", options["max_tokens"], 1),
        ("--limit", options["limit"], 1),
        ("--side-by-side", side_by_side, 0),
    ):
        if value is not None and value < least:
            raise BadInput(f"{flag} is {value}: it must be at least {least}")
    if options["dtype"] not in (None, "bfloat16", "float16", "float32"):
        raise BadInput(f"--dtype is {options['dtype']!r}: use bfloat16, float16 or float32")
    if options["kv_budget"] is not None:
        try:
            options["kv_budget"] = KVBudget.parse(options["kv_budget"])
        except ValueError as error:
            raise BadInput(f"--{str(error).replace('_', '-', 1)}") from None


def _rows(
    settings: Settings,
    model: str,
    out: Path | None,
    advance: Advance,
    *,
    prompts: Path | None,
    answers: Path | None,
    base: str | None,
    prompt_column: str,
    category_column: str | None,
    max_tokens: int,
    limit: int | None,
    kv_budget: KVBudget | None,
    dtype: str | None,
    no_likelihood: bool,
) -> tuple[list["EvaluatedRow"], dict[str, Any]]:
    """The evaluated rows, and what is worth knowing of how they came to be."""
    from jobs.logs import configure_logs

    if answers is not None and no_likelihood:  # nothing is loaded, so that neither model has to be here
        return _answered(answers, limit), {"model": model, "answers": str(answers)}
    questions = [] if prompts is None else read_questions(prompts, prompt_column, category_column, limit)
    given = [] if answers is None else _answered(answers, limit)
    configure_logs()
    from apar.evaluation.store import ANSWERS_FILE, write_answers
    from worker.evaluation.contestants import find_contestants
    from worker.evaluation.run import answer_both, score_rows

    def say(line: str) -> None:
        click.echo(line, err=True)

    contestants = find_contestants(model, base, settings, kv_budget=kv_budget, dtype=dtype, say=say)
    facts: dict[str, Any] = {"model": model, "base": contestants[1].name, "answers": str(answers)}
    if answers is None:
        given, made = answer_both(*contestants, questions, max_tokens, advance=advance, say=say)
        facts = {"prompts": str(prompts), **made}
        if out is not None:  # what took long is safe before the next part begins
            write_answers(given, out / ANSWERS_FILE)
    if not no_likelihood:
        given, scored = score_rows(given, contestants[1], advance=advance)
        facts |= scored
    return given, facts


def _answered(path: Path, limit: int | None) -> list["EvaluatedRow"]:
    from apar.evaluation.presenting import spread
    from apar.evaluation.store import read_answers

    rows = read_answers(path)
    return [rows[i] for i in spread(len(rows), limit or len(rows))]


def read_questions(path: Path, prompt_column: str, category_column: str | None, limit: int | None) -> list["Question"]:
    """Read a file of prompts; rows without a category are of the category "none" where others have one.

    Raises:
        BadInput: not a readable Parquet file, no such column, a row without a prompt, or a category called `all`.
    """
    from apar.evaluation.presenting import spread
    from apar.evaluation.report import ALL
    from jobs.columns import to_python
    from jobs.source import is_jsonl, iter_batches, open_parquet, require_column
    from worker.evaluation.answering import Question

    if is_jsonl(path):
        raise BadInput(f"{path.name} is JSONL: write the prompts as Parquet")
    with open_parquet(path, None) as file:
        names = file.schema_arrow.names
        require_column(file.schema_arrow, prompt_column, path)
        if category_column is not None:
            require_column(file.schema_arrow, category_column, path)
        category = category_column or ("category" if "category" in names else None)
        columns = [prompt_column, *([] if category in (None, prompt_column) else [category])]
        prompts: list[Any] = []
        categories: list[Any] = []
        for batch in iter_batches(file, [name for name in columns if name], path.name):
            prompts += to_python(batch.column(prompt_column))
            categories += to_python(batch.column(category)) if category else [""] * batch.num_rows
    questions = []
    for row in spread(len(prompts), limit or len(prompts)):
        turns = prompts[row]
        prompt = turns[0] if isinstance(turns, list) and turns else turns
        if not isinstance(prompt, str) or not prompt:
            raise BadInput(f"{path.name}: row {row} has no text in {prompt_column!r}: remove it or name another column")
        named = "none" if categories[row] is None else str(categories[row])
        if named == ALL:
            raise BadInput(f"{path.name}: row {row} is of a category {ALL!r}, as the total is: give it another name")
        questions.append(Question(row, prompt, named or ("none" if category else "")))
    return questions


# --- what comes out ---


def _publish(
    rows: list["EvaluatedRow"], facts: dict[str, Any], out: Path | None, as_json: bool, side_by_side: int
) -> None:
    from apar.evaluation import report_rows
    from apar.evaluation.presenting import COLUMNS, LEGEND, table_rows

    if out is None:
        reports = report_rows(rows)
    else:
        from worker.evaluation.run import write_evaluation

        reports = write_evaluation(rows, facts, out)
        click.echo(f"written to {out}", err=True)
    if as_json:
        for report in reports:
            print_json(report.as_json())
    else:
        print_table(f"{facts['model']} and its base", COLUMNS, table_rows(reports))
        click.echo(LEGEND, err=True)
    _print_side_by_side(rows, side_by_side, to_stderr=as_json)


def _print_side_by_side(rows: list["EvaluatedRow"], num_rows: int, *, to_stderr: bool) -> None:
    from apar.evaluation.presenting import caption, headline, spread

    for i in spread(len(rows), num_rows) if num_rows else []:
        row = rows[i]
        parts = [f"\n=== {headline(row)}"]
        for name, side in (("model", row.model), ("base", row.base)):
            parts += [f"--- {name}: {caption(side.answer)}", side.answer.text.strip()]
        click.echo(without_controls("\n".join(parts)), err=to_stderr)
