"""A file that cannot be used is refused with one line, and leaves nothing behind."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import MODEL, check_integrity, num_rows_in_tables, write_table

from db.session import Database
from jobs import reading, store
from jobs import submit as submit_module
from jobs.errors import BadInput, Unavailable
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, submit_file


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test alone."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def refusal(database: Database, settings: Settings, path: Path, **options: Any) -> str:
    """The message with which a file is refused; checks that it is one line and that nothing was kept."""
    with pytest.raises(BadInput) as caught:
        submit_file(database, settings, path, SubmitOptions(model=MODEL, **options))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert set(num_rows_in_tables(database).values()) == {0}
    assert not settings.data_dir.exists() or list(settings.data_dir.iterdir()) == []
    assert os.listdir(tempfile.gettempdir()) == []
    return str(caught.value)


PROMPTS = {"prompt": ["a", "b"], "question": ["c", "d"]}


def test_what_is_not_parquet_is_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for content in (b"", b"P", b"PAR1", b"PAR1PAR1", b"hello world, this is text", b"PAR1" + b"\xff" * 64 + b"PAR1"):
        path.write_bytes(content)
        assert "x.parquet is not a readable Parquet file" in refusal(database, settings, path)


def test_a_path_that_is_no_file_is_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    assert "no such file" in refusal(database, settings, tmp_path / "missing.parquet")
    assert "no such file" in refusal(database, settings, tmp_path / "missing.jsonl")
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    assert "not a regular file" in refusal(database, settings, folder)
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    assert "not a regular file" in refusal(database, settings, pipe)
    link = tmp_path / "link.parquet"
    link.symlink_to(tmp_path / "nowhere")
    assert "no such file" in refusal(database, settings, link)


@pytest.mark.parametrize("name", ["x.csv", "x", "x.parquet.gz", ".parquet"])
def test_another_suffix_is_refused(database: Database, settings: Settings, tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, PROMPTS)
    assert "forq reads .parquet, .pq, .jsonl, .ndjson" in refusal(database, settings, path)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            PROMPTS,
            {"prompt_column": "promt"},
            "no column 'promt'; did you mean 'prompt'? Its columns: prompt, question",
        ),
        (PROMPTS, {"prompt_column": "xyz"}, "no column 'xyz'. Its columns: prompt, question"),
        (PROMPTS, {"messages_column": "chat"}, "no column 'chat'"),
        (PROMPTS, {"id_column": "questoin"}, "did you mean 'question'?"),
        ({"text": ["a"]}, {}, "neither a 'prompt' nor a 'messages' column (its columns: text)"),
        ({"prompt": [1]}, {}, "column 'prompt' has type int64: prompts are strings"),
        ({"messages": [1]}, {}, "column 'messages' has type int64: it must be list<struct<role, content>>"),
        ({"messages": [[{"from": "user"}]]}, {}, "it must be list<struct<role, content>>"),
        ({"prompt": pa.array([], pa.string())}, {}, "has 0 rows: at least 1 is needed"),
        ({"prompt": ["a"], "forq_output": ["b"]}, {}, "has column(s) forq_output"),
        ({}, {}, "0 rows"),
    ],
)
def test_a_file_without_usable_columns_is_refused(
    database: Database,
    settings: Settings,
    tmp_path: Path,
    columns: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    path = write_table(tmp_path / "x.parquet", columns)
    assert message in refusal(database, settings, path, **options)


def test_a_column_name_twice_is_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    path = write_table(tmp_path / "x.parquet", table)
    assert "1 column name(s) twice (prompt)" in refusal(database, settings, path)


def test_too_many_rows_are_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    small = settings.model_copy(update={"limits": Limits(max_rows=3)})
    path = write_table(tmp_path / "x.parquet", {"prompt": ["a"] * 4})
    assert "has 4 rows, the limit is 3: split it or raise limits.max_rows" in refusal(database, small, path)
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(f'{{"custom_id": "{n}", "url": "u", "body": {{}}}}' for n in range(4)))
    assert "has over 3 lines" in refusal(database, small, lines)


def some_rows(num_rows: int) -> pa.Table:
    chance = random.Random(7)
    return pa.table(
        {
            "prompt": ["".join(chance.choices("abcdefgh ", k=60)) for _ in range(num_rows)],
            "messages": [[{"role": "user", "content": str(n)}] for n in range(num_rows)],
        }
    )


def test_a_file_truncated_anywhere_is_refused(database: Database, settings: Settings, tmp_path: Path) -> None:
    whole = write_table(tmp_path / "whole.parquet", some_rows(600), row_group_size=100).read_bytes()
    path = tmp_path / "x.parquet"
    for size in [1, 4, 8, 100, *range(0, len(whole), len(whole) // 25), len(whole) - 1, len(whole) - 4, len(whole) - 8]:
        path.write_bytes(whole[:size])
        assert "is not a readable Parquet file" in refusal(database, settings, path)


@pytest.mark.parametrize(("codec", "column"), [("zstd", "prompt"), ("snappy", "messages"), ("none", "prompt")])
def test_a_file_with_flipped_bits_is_refused_or_whole(
    settings: Settings, templates: Any, tmp_path: Path, codec: str, column: str
) -> None:
    """Never an exception of another kind, never a part of the rows. Needs no second database: it ends before one."""
    database = Database(templates.copy("sqlite", tmp_path))
    whole = write_table(tmp_path / "whole.parquet", some_rows(300), row_group_size=100, compression=codec).read_bytes()
    chance = random.Random(f"{codec}{column}")
    path = tmp_path / "x.parquet"
    options = SubmitOptions(model=MODEL, **{f"{column}_column": column})
    num_refused = 0
    for attempt in range(24):
        damaged = bytearray(whole)
        # Half of the flips in the footer, where sizes, offsets, types and counts are.
        start = 0 if attempt % 2 else len(whole) - 2500
        for _ in range(chance.choice([1, 1, 4])):
            damaged[chance.randrange(start, len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            submitted = submit_file(database, settings, path, options)
        except BadInput as error:
            num_refused += 1
            assert "\n" not in str(error), str(error)  # noqa: PT017
        else:
            assert submitted.num_rows > 0
            check_integrity(database, submitted.job_id)
        assert os.listdir(tempfile.gettempdir()) == []
    assert num_refused > 3
    database.dispose()


def test_a_footer_that_promises_other_rows_than_there_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "x.parquet", {"prompt": ["a"] * 600})
    request = reading.Request(path, MODEL, None, None, None, None, shard_rows=100)
    honest = reading.iter_batches

    def fewer(*arguments: Any) -> Any:
        yield from list(honest(*arguments))[:-1]

    def more(*arguments: Any) -> Any:
        yield from [*honest(*arguments), *honest(*arguments)]

    for batches, says in ((fewer, "holds 512"), (more, "holds more")):
        monkeypatch.setattr(reading, "iter_batches", batches)
        with pytest.raises(BadInput, match=f"says it has 600 rows but {says}"):
            reading.read(request, Limits(), tmp_path, lambda phase, done, total: None)


def test_a_file_that_is_written_while_it_is_read_is_refused(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    path = write_table(tmp_path / "x.parquet", {"prompt": ["a"]})

    def replace(phase: str, done: int, total: int) -> None:
        write_table(tmp_path / "new.parquet", {"prompt": ["another", "file"]}).replace(path)

    with pytest.raises(BadInput, match="was written to while it was read"):
        submit_file(database, settings, path, SubmitOptions(model=MODEL), replace)
    assert set(num_rows_in_tables(database).values()) == {0}
    assert list(settings.data_dir.iterdir()) == []


def test_a_full_disk_is_named_and_nothing_is_kept(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "x.parquet", {"prompt": ["a"]})

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(submit_module, "read_confined", full)  # that a full disk comes through it: test_jobs_confined.py
        with pytest.raises(Unavailable, match=r"No space left on device\): check space and rights in .*scratch"):
            submit_file(database, settings, path, SubmitOptions(model=MODEL))
    monkeypatch.setattr(store, "publish", full)
    with pytest.raises(Unavailable, match="No space left on device"):
        submit_file(database, settings, path, SubmitOptions(model=MODEL))
    assert list(settings.data_dir.iterdir()) == []
    assert set(num_rows_in_tables(database).values()) == {0}


def test_a_failing_insert_leaves_no_part_of_a_job(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "x.parquet", {"prompt": ["a"] * 9000})
    insert = submit_module._insert_requests

    def fail_at_the_second_chunk(connection: Any, is_sqlite: bool, rows: list[Any]) -> None:
        if rows[0][1] > 0:
            raise RuntimeError("the database went away")
        insert(connection, is_sqlite, rows)

    monkeypatch.setattr(submit_module, "_insert_requests", fail_at_the_second_chunk)
    with pytest.raises(RuntimeError):
        submit_file(database, settings, path, SubmitOptions(model=MODEL))
    assert set(num_rows_in_tables(database).values()) == {0}


def test_an_ordinary_file_passes_all_of_these_checks(database: Database, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "X.PQ"
    pq.write_table(some_rows(300), path)
    assert submit_file(database, settings, path, SubmitOptions(model=MODEL)).num_rows == 300
