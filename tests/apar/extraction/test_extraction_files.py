"""Files: columns, order, reasons, bounded memory, and input that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from apar.cli import data
from apar.errors import InputError
from apar.extraction import Options, TreeNode, extract_file, files, restore, verify

LIST = "Tips:\n\n1. Sleep: go to bed early\n2. Eat: have some fruit\n3. Walk: go out at noon\n\nThe end."
PLAIN = "One paragraph. It has two sentences."
SHORT = "1. Apples\n2. Pears\n3. Plums"


def table(responses: list[Any], **more: list[Any]) -> pa.Table:
    return pa.table({"prompt": [f"prompt {i}" for i in range(len(responses))], "response": responses, **more})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(table([LIST, None, PLAIN, SHORT, LIST], number=[0, 1, 2, 3, 4]), path)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def run(*args: Any) -> Result:
    return CliRunner().invoke(data, ["extract", *map(str, args)])


def test_the_output_keeps_the_columns_and_adds_kind_reason_and_nodes(source: Path, target: Path) -> None:
    report = extract_file(source, target)
    out = pq.read_table(target)
    assert out.schema.names == ["prompt", "response", "number", "kind", "reason", "nodes"]
    assert out.schema.field("nodes").type.value_type == files.NODE_TYPE
    assert out["number"].to_pylist() == [0, 2, 4]
    assert out["kind"].to_pylist() == ["list", "unstructured", "list"]
    assert out["reason"].to_pylist() == [None, "plain", None]
    for row in out.to_pylist():
        nodes = [TreeNode(n["start"], n["end"], n["first_child"], n["next_sibling"]) for n in row["nodes"]]
        verify(row["response"], nodes)
        assert restore(row["response"], nodes) == row["response"]
        assert [n["node"] for n in row["nodes"]] == list(range(len(nodes)))
        assert all(n["text"] == row["response"][n["start"] : n["end"]] for n in row["nodes"])
    assert (report.num_structured, report.num_negatives, report.num_dropped, report.num_forks) == (2, 1, 2, 6)
    assert report.outcomes[None, "null_response"] == 1


def test_dropped_answers_are_kept_on_request(source: Path, target: Path) -> None:
    extract_file(source, target, keep_dropped=True)
    rows = pq.read_table(target).to_pylist()
    assert [row["kind"] for row in rows] == ["list", None, "unstructured", None, "list"]
    assert [row["reason"] for row in rows] == [None, "null_response", "plain", "points_without_detail", None]
    assert rows[1]["nodes"] is rows[3]["nodes"] is None


def test_worker_processes_give_the_same_file_in_the_same_order(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ALONE_ROWS", 10)
    source, alone = tmp_path / "many.parquet", tmp_path / "alone.parquet"
    pq.write_table(table([[LIST, None, PLAIN, SHORT][i % 4] for i in range(1000)], number=list(range(1000))), source)
    seen: list[tuple[int, int]] = []
    extract_file(source, target, num_processes=2, advance=lambda done, total: seen.append((done, total)))
    extract_file(source, alone, num_processes=1)
    assert pq.read_table(target).equals(pq.read_table(alone))
    assert pq.read_table(target)["number"].to_pylist() == [i for i in range(1000) if i % 4 in (0, 2)]
    assert seen == sorted(seen)
    assert seen[-1] == (1000, 1000)


def test_only_so_many_batches_are_under_way(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stays a few batches ahead of writing, however long the file is."""
    read = written = ahead = 0

    class Pool:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def submit(self, *args: Any) -> Any:
            return type("Done", (), {"result": lambda self: []})()

        def shutdown(self, **kwargs: Any) -> None: ...

    def batches(*args: Any) -> Any:
        nonlocal read
        for _ in range(500):
            read += 1
            yield pa.RecordBatch.from_pydict({"response": [LIST]})

    monkeypatch.setattr(files, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(files, "_batches", batches)
    for _ in files._in_order(source, None, "response", "markdown", Options(), 4):  # type: ignore[arg-type]
        written += 1
        ahead = max(ahead, read - written)
    assert written == 500
    assert ahead < 4 * files._BATCHES_PER_PROCESS


def test_a_file_of_one_large_row_group_is_read_in_batches(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "large.parquet"
    pq.write_table(table([PLAIN] * 20_000), path, row_group_size=20_000)
    sizes = [batch.num_rows for batch in files._batches(path, files._open(path))]
    assert max(sizes) <= files._BATCH_ROWS
    assert sum(sizes) == 20_000


def test_text_that_is_not_utf8_is_dropped_with_a_reason(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "bytes.parquet"
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([LIST.encode(), b"\xff\xfe broken"]).buffers())
    pq.write_table(pa.table({"prompt": ["a", "b"], "response": broken}), path)
    report = extract_file(path, target)
    assert report.outcomes == {("list", None): 1, (None, "not_utf8"): 1}
    assert pq.read_table(target).num_rows == 1


def test_large_strings_and_empty_files_and_columns_of_nulls_are_read(tmp_path: Path, target: Path) -> None:
    for responses in ([LIST], [], [None, None]):
        kind = pa.null() if responses == [None, None] else pa.large_string()
        pq.write_table(
            pa.table({"prompt": pa.array([""] * len(responses)), "response": pa.array(responses, kind)}), target
        )
        out = tmp_path / "o.parquet"
        assert extract_file(target, out).num_rows == len(responses)
        assert pq.read_table(out).schema.names[-3:] == ["kind", "reason", "nodes"]


def bad(tmp_path: Path, name: str) -> tuple[list[Any], str]:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table([LIST]), source)
    if name == "no file":
        return [tmp_path / "none.parquet", out], "is not a file"
    if name == "no Parquet":
        source.write_text("prompt,response\n")
        return [source, out], "cannot be read as Parquet"
    if name == "cut short":
        source.write_bytes(source.read_bytes()[:-20])
        return [source, out], "cannot be read as Parquet"
    if name == "no response column":
        return [source, out, "--response-column", "answer"], "has no column 'answer': its columns are prompt, response"
    if name == "no prompt column":
        return [source, out, "--prompt-column", "p"], "has no column 'p'"
    if name == "numbers":
        pq.write_table(pa.table({"prompt": ["a"], "response": [1]}), source)
        return [source, out], "column 'response' of .* holds int64: a column of strings is needed"
    if name in ("kind", "reason", "nodes"):
        pq.write_table(table([LIST], **{name: ["x"]}), source)
        return [source, out], f"has a column '{name}', which extraction adds: rename or drop it"
    if name == "same file":
        return [source, source], "is the input as well"
    if name == "folder":
        return [source, tmp_path], "is a folder"
    if name == "no folder":
        return [source, tmp_path / "none" / "out.parquet"], "cannot be written: No such file or directory"
    if name == "no processes":
        return [source, out, "--processes", 0], "processes is 0: use 1 or more"
    return [source, out, "--min-points", 0], "min_points is 0: use 1 or more"


BAD = [
    *("no file", "no Parquet", "cut short", "no response column", "no prompt column", "numbers", "kind", "reason"),
    *("nodes", "same file", "folder", "no folder", "no processes", "no points"),
]


@pytest.mark.parametrize("name", BAD)
def test_input_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path, name: str) -> None:
    args, message = bad(tmp_path, name)
    before = sorted(tmp_path.iterdir())
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failure_leaves_the_old_output_and_nothing_else(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.write_text("old")

    def fail(*args: Any) -> Any:
        raise InputError("the disk is gone")

    monkeypatch.setattr(files, "_output", fail)
    with pytest.raises(InputError):
        extract_file(source, target)
    assert target.read_text() == "old"
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.parquet", "out.parquet"]


def test_the_report_is_a_table_or_json(source: Path, target: Path) -> None:
    result = run(source, target, "--report")
    assert result.exit_code == 0
    assert "tree, list\t\t2\t40.0%" in result.stdout
    assert "dropped\tpoints_without_detail\t1\t20.0%" in result.stdout
    assert "2 trees, 1 negatives, 2 dropped of 5 answers" in result.stdout
    value = json.loads(run(source, target, "--json").stdout)
    assert (value["rules"], value["rows"], value["structured"], value["forks"]) == ("markdown", 5, 2, 6)
    assert value["structured_share"] == 0.4
    assert {"kind": None, "reason": "null_response", "count": 1, "share": 0.2} in value["outcomes"]
    assert sum(outcome["count"] for outcome in value["outcomes"]) == 5
    assert 0 < value["path_share"] < 1


def test_options_reach_the_rules(source: Path, target: Path) -> None:
    value = json.loads(run(source, target, "--json", "--rules", "paper", "--min-points", 4).stdout)
    assert value["rules"] == "paper"
    assert value["structured"] == 0
    assert run(source, target, "--keep-dropped").exit_code == 0
    assert pq.read_table(target).num_rows == 5
    assert run(source, target, "--rules", "html").exit_code == 2
