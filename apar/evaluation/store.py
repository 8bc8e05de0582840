"""The files of an evaluation: `answers.parquet`, one row per prompt, and `report.json`.

`answers.parquet` holds everything that a report is made of, so that it can be reported and scored again without an
engine. Both files appear whole or not at all.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from apar.errors import InputError
from apar.evaluation.answers import Answer, AnswerNode, EvaluatedRow, Likelihood, Measured
from apar.evaluation.report import CategoryReport
from apar.files import replacing, write_file

ANSWERS_FILE = "answers.parquet"
REPORT_FILE = "report.json"
PLOT_FILE = "report.png"

_TREE = pa.list_(
    pa.struct([(field.name, pa.string() if field.name == "kind" else pa.int32()) for field in fields(AnswerNode)])
)
_COUNTS = ("prompt_tokens", "output_tokens", "threads", "steps", "peak_cached_tokens", "attended_tokens")
_SIDE = [
    ("answer", pa.string()),
    ("finish_reason", pa.string()),
    *((name, pa.int64()) for name in _COUNTS),
    ("empty_threads", pa.int64()),
    ("log_likelihood", pa.float64()),
    ("scored_tokens", pa.int64()),
    ("ngrams", pa.int64()),
    ("repeated_ngrams", pa.int64()),
    ("repeats_sentence", pa.bool_()),
    ("loops", pa.bool_()),
    ("unfinished_list", pa.string()),
    ("tree", _TREE),
]
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("category", pa.string()),
        ("prompt", pa.string()),
        *((f"{side}_{name}", kind) for side in ("model", "base") for name, kind in _SIDE),
    ]
)


def write_answers(rows: Sequence[EvaluatedRow], target: Path) -> None:
    """Write `SCHEMA`'s columns; figures that can be counted again from the others are there to be looked at."""
    table = pa.Table.from_pylist([_as_columns(row) for row in rows], schema=SCHEMA)
    with replacing(target) as new:
        pq.write_table(table, new, compression="zstd")


def read_answers(path: Path) -> list[EvaluatedRow]:
    """Read what `write_answers` wrote; what can be counted again is counted again.

    Raises:
        InputError: no such file, no such columns, or no rows.
    """
    if not path.is_file():
        raise InputError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path.name} is not a readable Parquet file ({reason}): write it again") from None
    missing = [field.name for field in SCHEMA if field.name not in table.schema.names]
    if missing:
        raise InputError(
            f"{path.name} lacks {len(missing)} of the columns of evaluated answers, {missing[0]!r} first: "
            f"give an {ANSWERS_FILE} that an evaluation wrote"
        )
    if table.num_rows == 0:
        raise InputError(f"{path.name} has 0 rows: at least 1 is needed")
    try:
        return [_from_columns(values) for values in table.select(SCHEMA.names).cast(SCHEMA).to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path.name} does not hold evaluated answers ({reason}): write it again") from None


def write_report(reports: Sequence[CategoryReport], facts: dict[str, Any], target: Path) -> None:
    """Write the facts of the run and, under `categories`, each report."""
    value = {**facts, "categories": [report.as_json() for report in reports]}
    write_file(target, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def _as_columns(row: EvaluatedRow) -> dict[str, Any]:
    values: dict[str, Any] = {"row": row.row, "category": row.category or None, "prompt": row.prompt}
    for name, side in (("model", row.model), ("base", row.base)):
        answer, quality, likelihood = side.answer, side.quality, side.likelihood
        own = {
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            **{count: getattr(answer, count) for count in _COUNTS},
            "empty_threads": answer.empty_threads,
            "log_likelihood": likelihood and likelihood.log_likelihood,
            "scored_tokens": likelihood and likelihood.num_tokens,
            **asdict(quality),
            "tree": [asdict(node) for node in answer.nodes],
        }
        values |= {f"{name}_{column}": value for column, value in own.items()}
    return values


def _from_columns(values: dict[str, Any]) -> EvaluatedRow:
    sides = []
    for name in ("model", "base"):
        own = {column: values[f"{name}_{column}"] for column, _ in _SIDE}
        nodes = tuple(AnswerNode(**node) for node in own["tree"] or ())
        counts = {count: int(own[count]) for count in _COUNTS}
        answer = Answer(text=own["answer"] or "", finish_reason=own["finish_reason"], **counts, nodes=nodes)
        scored = own["log_likelihood"] is not None and own["scored_tokens"] is not None
        likelihood = Likelihood(own["log_likelihood"], own["scored_tokens"]) if scored else None
        sides.append(Measured.of(answer, likelihood))
    return EvaluatedRow(values["row"], values["prompt"] or "", values["category"] or "", *sides)
