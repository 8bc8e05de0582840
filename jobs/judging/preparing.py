"""From a file of answers to what a judging needs: the judge's prompts and the facts of the items, as files.

In: the file, the options. Out: `Prepared`, plain data, and two files in a scratch folder. It touches no database, so
that it can run in a process of its own (`confined`): the answers are a stranger's. Whoever reads the facts gets names
and errors, which are short, and neither prompts nor answers.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.errors import BadInput
from jobs.judging.answers import Answers, open_answers
from jobs.judging.folder import PROMPTS_FILE
from jobs.judging.items import Item, Items, item_of
from jobs.judging.options import JudgeOptions
from jobs.judging.pairs import pairs_of
from jobs.judging.prompts import make_prompts, write_prompts
from jobs.judging.rubrics import Rubric, load_rubric
from jobs.messages import storable_error
from jobs.source import Progress

ITEMS_FILE = "items.arrow"
_ITEMS_SCHEMA = pa.schema(
    [
        ("row", pa.int64()), ("question", pa.string()), ("id", pa.string()), ("category", pa.string()),
        ("model", pa.string()), ("model_b", pa.string()), ("row_b", pa.int64()), ("error", pa.string()),
    ]
)  # fmt: skip
_WRITE_ROWS = 4096
_REPORT_ITEMS = 256


@dataclass(frozen=True)
class Prepared:
    rubric: Rubric
    num_turns: int
    num_rows: int
    num_unpaired: int

    def said(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def prepared_of(said: dict[str, Any]) -> Prepared:
    rubric = Rubric(**{**said["rubric"], "scale": tuple(said["rubric"]["scale"])})
    return Prepared(**{**said, "rubric": rubric})


def prepare(path: Path, options: JudgeOptions, scratch: Path, report: Progress) -> Prepared:
    """Write `PROMPTS_FILE` and `ITEMS_FILE` (`read_facts`) into the scratch folder.

    Raises:
        BadInput: the file, the rubric or the options cannot be used, or no item can be judged.
    """
    with open_answers(path, options.kind, options.columns) as answers:
        rubric = load_rubric(options.rubric, options.kind, answers.num_turns, options.scale)
        form = options.form(rubric)
        compiled = rubric.compile(answers.names)
        items = read_items(answers, compiled.uses, options.limit, report)
        num_turns = answers.num_turns
    turns = options.judged_turns(num_turns)
    prompts, errors = make_prompts(_each(items.items, report), compiled, form, turns, options.ordered)
    if not prompts:
        raise BadInput(f"{path.name}: none of {len(items.items)} item(s) can be judged: {next(iter(errors.values()))}")
    write_prompts(prompts, scratch / PROMPTS_FILE, report)
    _write_facts(items.items, errors, scratch / ITEMS_FILE)
    return Prepared(rubric, num_turns, items.num_rows, items.num_unpaired)


def read_items(answers: Answers, uses: Collection[str], limit: int | None, report: Progress) -> Items:
    """
    Args:
        uses: the columns to keep for the rubric.
        limit: of questions: rows, or where answers are paired, questions with all their pairs.

    Raises:
        BadInput: the file is damaged, its rows cannot be paired, a category is called as the total is.
    """
    items = [item_of(answers, uses, number, row) for number, row in enumerate(answers.rows(uses, report))]
    if answers.is_paired:
        pairs, num_unpaired = pairs_of(answers, items, limit)
        return Items(pairs, answers.num_rows, num_unpaired)
    return Items(items[:limit], answers.num_rows)


def _each(items: list[Item], report: Progress) -> Iterator[Item]:
    """Every item once. Its values go when its prompts are there, which hold the same texts: memory is limited here."""
    for number, item in enumerate(items):
        items[number] = replace(item, values={})
        yield item
        if (number + 1) % _REPORT_ITEMS == 0 or number + 1 == len(items):
            report("rendering", number + 1, len(items))


def _write_facts(items: list[Item], errors: dict[int, str], path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _ITEMS_SCHEMA) as writer:
        for start in range(0, len(items), _WRITE_ROWS):
            some = [
                item if number not in errors else replace(item, error=storable_error(errors[number]))
                for number, item in enumerate(items[start : start + _WRITE_ROWS], start=start)
            ]
            columns = [[getattr(item, name) for item in some] for name in _ITEMS_SCHEMA.names]
            writer.write_batch(pa.record_batch(columns, schema=_ITEMS_SCHEMA))


def read_facts(scratch: Path) -> Iterator[Item]:
    """The items, without their values; what cannot be asked, the rubric's failures too, has an error."""
    with pa.OSFile(str(scratch / ITEMS_FILE), "rb") as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            for row in batch.to_pylist():
                yield Item(**row)
