"""What comes out: the input untouched, beside it the results, in order, whole or not at all."""

import datetime
import decimal
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import (
    MODEL,
    acquire,
    answered,
    drafted,
    drain,
    failed,
    requests_of,
    run_shard,
    sample,
    submit_rows,
    submit_table,
    write_table,
)
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from db.session import Database
from jobs import export as export_module
from jobs import leases, results
from jobs.ending import cancel
from jobs.errors import BadInput, NotFound, Unavailable
from jobs.export import RESULT_FIELDS, TREE_FIELD, export_job
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, submit_file


def exported(database: Database, settings: Settings, job_id: str, **options: Any) -> pa.Table:
    target = settings.home.parent / "out.parquet"
    written = export_job(database, settings, job_id, target, **options)
    table = pq.read_table(target)
    table.validate(full=True)
    assert written.num_rows == table.num_rows
    return table


def test_answers_come_out_in_input_order_with_every_result_column(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 10)
    held = [acquire(database) for _ in range(3)]
    for lease in reversed(held):
        rows = results.load(database, lease).rows
        results.write(database, lease, [answered(row) for row in reversed(rows)])
        leases.finish(database, lease)
    table = exported(database, settings, job_id)
    assert table.schema.names == ["prompt", *(field.name for field in RESULT_FIELDS)]
    assert [table.schema.field(field.name).type for field in RESULT_FIELDS] == [field.type for field in RESULT_FIELDS]
    assert table["prompt"].to_pylist() == [f"question {n}" for n in range(10)]
    assert table["forq_output"].to_pylist() == [f"answer {n}" for n in range(10)]
    assert table.slice(3, 1).drop_columns(["prompt", "forq_output"]).to_pylist() == [
        {
            "forq_finish_reason": "stop", "forq_error_code": None, "forq_error": None, "forq_sample": 0,
            "forq_prompt_tokens": 3, "forq_output_tokens": 2, "forq_threads": 1, "forq_forks": 0, "forq_max_width": 1,
            "forq_steps": 2, "forq_peak_cached_tokens": 5, "forq_peak_blocks": 1, "forq_attended_tokens": 10,
            "forq_sequential_peak_tokens": 5, "forq_sequential_attended_tokens": 20, "forq_preemptions": 0,
            "forq_forwards": None, "forq_hit_rate": None, "forq_acceptance_length": None,
            "forq_decoding_efficiency": None, "forq_draft_nodes": None, "forq_verify_nodes": None,
            "forq_cached_tokens": None,
        }
    ]  # fmt: skip


def test_a_decoders_own_figures_are_columns_where_there_are_any(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3)
    drain(database, lambda row: drafted(row) if row.row_index == 1 else answered(row))
    table = exported(database, settings, job_id)
    assert table["forq_forwards"].to_pylist() == [None, 4, None]
    assert table["forq_hit_rate"].to_pylist() == [None, 0.75, None]
    assert table["forq_acceptance_length"].to_pylist() == [None, pytest.approx(7 / 3, abs=1e-15), None]
    assert table["forq_decoding_efficiency"].to_pylist() == [None, 2.0, None]
    assert table["forq_draft_nodes"].to_pylist() == [None, 40, None]
    assert table["forq_verify_nodes"].to_pylist() == [None, 17, None]


def test_a_row_with_several_samples_becomes_as_many_rows(database: Database, settings: Settings) -> None:
    sampling = pa.array([{"n": 3}, None, {"n": 2}])
    job_id = submit_table(database, settings, {"prompt": ["a", None, "c"], "sampling": sampling}).job_id
    drain(database)
    table = exported(database, settings, job_id)
    assert table["prompt"].to_pylist() == ["a", "a", "a", None, "c", "c"]
    assert table["forq_sample"].to_pylist() == [0, 1, 2, None, 0, 1]
    assert table["forq_error_code"].to_pylist() == [None, None, None, "empty_prompt", None, None]


def test_an_export_in_mid_run_has_every_row_and_nulls_where_nothing_is_yet(
    database: Database, settings: Settings
) -> None:
    job_id = submit_rows(database, settings, 10)
    assert exported(database, settings, job_id)["forq_output"].to_pylist() == [None] * 10
    acquire(database)
    run_shard(database, acquire(database))
    cancel(database, job_id)
    table = exported(database, settings, job_id)
    assert table["forq_output"].to_pylist() == [None] * 4 + [f"answer {n}" for n in range(4, 8)] + [None] * 2
    assert table["forq_error_code"].to_pylist() == [None] * 8 + ["cancelled"] * 2


def test_failed_rows_can_be_exported_alone(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, {"prompt": ["a", None, "c", "d", "e"]}).job_id
    assert exported(database, settings, job_id, failed_only=True)["prompt"].to_pylist() == [None]
    drain(database, lambda row: failed(row, error="too\nlong\x00") if row.row_index == 3 else answered(row))
    table = exported(database, settings, job_id, failed_only=True)
    assert table["prompt"].to_pylist() == [None, "d"]
    assert table["forq_error_code"].to_pylist() == ["empty_prompt", "engine_error"]
    assert table["forq_error"].to_pylist()[1] == "too long\ufffd"


def test_no_failed_row_gives_an_empty_file_with_the_whole_schema(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3)
    drain(database)
    table = exported(database, settings, job_id, failed_only=True, with_trees=True)
    assert table.num_rows == 0
    assert table.schema.names == ["prompt", *(field.name for field in [*RESULT_FIELDS, TREE_FIELD])]
    target = settings.home.parent / "out.jsonl"
    assert export_job(database, settings, job_id, target, format="jsonl", failed_only=True).num_rows == 0
    assert target.read_text() == ""


def test_trees_come_out_in_node_order_per_sample(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3, sampling={"n": 2})

    def with_trees(row: results.PendingRow) -> results.RowResult:
        if row.row_index == 1:
            return failed(row)
        samples = tuple(sample("x", num_nodes=row.row_index + number + 1) for number in range(2))
        return results.RowResult(row.request_id, samples)

    drain(database, with_trees)
    trees = exported(database, settings, job_id, with_trees=True)["forq_tree"].to_pylist()
    assert [tree and [node["node"] for node in tree] for tree in trees] == [[0], [0, 1], None, [0, 1, 2], [0, 1, 2, 3]]
    assert [node["kind"] for node in trees[4]] == ["root", "detail", "sibling", "detail"]
    assert trees[1][1] == {
        "node": 1, "parent": 0, "kind": "detail", "thread": 1, "start": 1, "end": 2, "first_step": 0, "last_step": 2
    }  # fmt: skip


def rich_table() -> pa.Table:
    """Columns of every awkward kind, with metadata on the schema and on a field."""
    day = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=datetime.UTC)
    columns = {
        "prompt": pa.array(["a", "b", "c"]),
        "nested": pa.array([[{"k": [1, None], "s": "é"}], [], None]),
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        "price": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-99.99")], pa.decimal128(10, 2)),
        "at": pa.array([day, None, day], pa.timestamp("us", tz="Europe/Berlin")),
        "ns": pa.array([1, 2, None], pa.timestamp("ns")),
        "day": pa.array([day.date(), None, day.date()]),
        "raw": pa.array([b"\x00\xff", b"", None]),
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "real": pa.array([float("nan"), float("inf"), 0.5]),
        "small": pa.array([1, None, 255], pa.uint8()),
        "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
        "flag": pa.array([True, None, False]),
        "nothing": pa.nulls(3),
        "big": pa.array(["x", None, "z"], pa.large_string()),
        "view": pa.array(["x", None, "a string that does not fit into a view"], pa.string_view()),
    }
    table = pa.table(columns)
    field = table.schema.field("flag").with_metadata({"note": "kept"})
    schema = table.schema.set(table.schema.get_field_index("flag"), field)
    return table.cast(schema).replace_schema_metadata({"huggingface": '{"info": {}}', "mine": "yes"})


def values_of(table: pa.Table, name: str) -> list[Any]:
    column = table[name].cast(pa.int64()) if name == "ns" else table[name]
    return column.to_pylist()


def test_input_columns_come_back_untouched(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, rich_table(), sampling={"n": 2}).job_id
    drain(database)
    kept = pq.read_table(settings.home.parent / "input.parquet")
    table = exported(database, settings, job_id)
    for name in kept.schema.names:
        assert table.schema.field(name).equals(kept.schema.field(name), check_metadata=True)
        # As text: NaN is not equal to itself.
        assert str(values_of(table, name)) == str([value for value in values_of(kept, name) for _ in range(2)])
    assert table.schema.metadata == kept.schema.metadata
    assert table.schema.metadata[b"mine"] == b"yes"


def test_json_lines_hold_every_kind_of_value(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, rich_table()).job_id
    drain(database)
    target = settings.home.parent / "out.jsonl"
    assert export_job(database, settings, job_id, target, format="jsonl", with_trees=True).num_rows == 3

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["forq_output"] for line in lines] == ["answer 0", "answer 1", "answer 2"]
    assert lines[0]["nested"] == [{"k": [1, None], "s": "é"}]
    assert lines[0]["price"] == "1.10"
    assert lines[0]["ns"] == "1970-01-01 00:00:00.000000001"
    assert [line["real"] for line in lines] == [None, None, 0.5]
    assert lines[0]["forq_tree"][0]["kind"] == "root"
    assert list(lines[0]) == [*rich_table().schema.names, *(field.name for field in [*RESULT_FIELDS, TREE_FIELD])]


def test_input_that_is_not_utf8_survives_both_formats(database: Database, settings: Settings) -> None:
    binary = pa.array([b"good", b"caf\xe9"])
    text = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    job_id = submit_table(database, settings, {"prompt": text}).job_id
    drain(database)
    target = settings.home.parent / "out.parquet"
    export_job(database, settings, job_id, target)
    back = pq.read_table(target)["prompt"].combine_chunks()
    assert back.cast(pa.binary(), safe=False).to_pylist() == [b"good", b"caf\xe9"]
    lines = settings.home.parent / "out.jsonl"
    export_job(database, settings, job_id, lines, format="jsonl")
    assert [json.loads(line)["prompt"] for line in lines.read_text().splitlines()] == ["good", "caf\ufffd"]


def test_batch_lines_are_exported_with_their_ids(database: Database, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    body = {"messages": [{"role": "user", "content": "x"}]}
    path.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}))
    job_id = submit_file(database, settings, path, SubmitOptions(model=MODEL)).job_id
    drain(database)
    row = exported(database, settings, job_id).to_pylist()[0]
    assert (row["custom_id"], json.loads(row["body"]), row["forq_output"]) == ("a", body, "answer 0")


def test_a_failing_export_leaves_nothing_and_keeps_the_old_file(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit_rows(database, settings, 600)
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "answers.parquet"
    target.write_text("the old one")
    read = export_module._results

    def fail_later(connection: Any, job_id: str, start: int, *rest: Any) -> Any:
        if start:
            raise RuntimeError("the database went away")
        return read(connection, job_id, start, *rest)

    monkeypatch.setattr(export_module, "_results", fail_later)
    for form in ("parquet", "jsonl"):
        with pytest.raises(RuntimeError):
            export_job(database, settings, job_id, target, format=form)
        assert os.listdir(folder) == ["answers.parquet"]
        assert target.read_text() == "the old one"


def test_a_target_that_cannot_be_written_is_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    job_id = submit_rows(database, settings, 3)
    for target in (tmp_path, tmp_path / "none" / "x.parquet", Path("/proc/forq.parquet")):
        with pytest.raises((BadInput, Unavailable)) as caught:
            export_job(database, settings, job_id, target)
        assert str(target) in str(caught.value)
    with pytest.raises(BadInput, match="format is 'csv': use parquet or jsonl"):
        export_job(database, settings, job_id, tmp_path / "x.csv", format="csv")


def test_a_job_or_input_that_is_not_here_is_not_found(database: Database, settings: Settings, tmp_path: Path) -> None:
    for job_id in ("none", "a\x00b"):
        with pytest.raises(NotFound, match="no job"):
            export_job(database, settings, job_id, tmp_path / "x.parquet")
    job_id = submit_rows(database, settings, 3)
    for path in settings.data_dir.iterdir():
        path.unlink()
    with pytest.raises(NotFound, match="export where it was submitted"):
        export_job(database, settings, job_id, tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_a_limit_lowered_after_the_submit_does_not_lock_the_answers_in(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3)
    small = settings.model_copy(update={"limits": Limits(max_rows=1)})
    assert exported(database, small, job_id).num_rows == 3


def test_the_footer_holds_no_text_of_the_rows(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3)
    drain(database)
    exported(database, settings, job_id)
    metadata = pq.ParquetFile(settings.home.parent / "out.parquet").metadata.row_group(0)
    assert not any(metadata.column(index).is_stats_set for index in range(metadata.num_columns))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(rows=st.lists(st.tuples(st.none() | TEXT, st.none() | TEXT, st.integers(0, 2**31)), min_size=1, max_size=12))
@hypothesis_settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
def test_any_table_of_texts_survives_from_submit_to_export(
    database: Database, settings: Settings, rows: list[tuple[str | None, str | None, int]]
) -> None:
    prompts, ids, numbers = (list(column) for column in zip(*rows, strict=True))
    given_table = pa.table(
        {"prompt": pa.array(prompts, pa.string()), "id": pa.array(ids, pa.string()), "number": numbers}
    )
    path = write_table(settings.home.parent / "any.parquet", given_table)
    job_id = submit_file(database, settings, path, SubmitOptions(model=MODEL, id_column="id")).job_id

    def echo(row: results.PendingRow) -> results.RowResult:
        return results.RowResult(row.request_id, (sample(row.payload["prompt"]),))

    drain(database, echo)
    table = exported(database, settings, job_id)
    assert table.select(["prompt", "id", "number"]).equals(given_table)
    expected = [text.replace("\x00", "\ufffd") if text and text.strip() else None for text in prompts]
    assert table["forq_output"].to_pylist() == expected
    assert [row.state for row in requests_of(database, job_id)] == [
        "completed" if text else "failed" for text in expected
    ]
