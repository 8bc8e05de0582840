"""The files of an evaluation: written, read back, refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluated import forked_example, measured, row

from apar.errors import InputError
from apar.evaluation import EvaluatedRow, Measured, report_rows
from apar.evaluation.plot import plot_reports
from apar.evaluation.store import SCHEMA, read_answers, write_answers, write_report


def rows() -> list[EvaluatedRow]:
    return [
        row(0, Measured.of(forked_example()), measured(-1.5, 4), "$1 & <b>"),
        row(3, measured(-2.5, 3, text="1. Plan:\n", finish_reason="length"), measured(text="A—ö"), ""),
    ]


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    target = tmp_path / "answers.parquet"
    write_answers(rows(), target)
    assert read_answers(target) == rows()
    assert [path.name for path in tmp_path.iterdir()] == ["answers.parquet"]
    table = pq.read_table(target)
    assert table.schema.equals(SCHEMA)
    assert table["model_unfinished_list"].to_pylist() == [None, "empty_point"]
    assert table["model_log_likelihood"].to_pylist() == [None, -2.5]
    assert table["model_tree"].to_pylist()[0][1]["kind"] == "detail"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"PAR1 not really", "not a readable Parquet file"),
        (pa.table({"prompt": ["x"]}), "lacks .* 'row' first"),
        (SCHEMA.empty_table(), "0 rows"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "answers.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(content, path)
    with pytest.raises(InputError, match=message) as error:
        read_answers(path)
    assert "\n" not in str(error.value)


def test_rows_with_missing_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.parquet"
    empty = pa.table({field.name: pa.nulls(1, field.type) for field in SCHEMA})
    pq.write_table(empty, path)
    with pytest.raises(InputError, match="does not hold evaluated answers"):
        read_answers(path)


def test_the_report_is_json_with_the_facts_of_the_run(tmp_path: Path) -> None:
    reports = report_rows(rows())
    write_report(reports, {"model": "m"}, tmp_path / "report.json")
    value = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert value["model"] == "m"
    assert [category["category"] for category in value["categories"]] == ["$1 & <b>", "all"]


def test_the_plot_is_a_png_whatever_the_categories_are_called(tmp_path: Path) -> None:
    target = tmp_path / "report.png"
    plot_reports(report_rows(rows()), target, "a $model$ beside its base")
    assert target.read_bytes().startswith(b"\x89PNG")
