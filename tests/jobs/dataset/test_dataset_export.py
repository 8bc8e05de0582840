"""The export of a data set, over both databases: what is written, and counts that add up."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import acquire, drain, failed, run_shard, sample, submit_table
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from db.session import Database
from jobs import results
from jobs.dataset.options import ExportOptions
from jobs.dataset.pipeline import DataSet, export_dataset
from jobs.ending import cancel
from jobs.errors import BadInput, NotFound, Unavailable
from jobs.settings import Settings

TASKS = ["Name a colour.", "Name a fruit.", "Name a river.", "Name a tree.", "Name a fish.", "Name a star."]


def answered(row: results.PendingRow, texts: list[str], reasons: str = "s", turns: int = 0) -> results.RowResult:
    """One sample for each text; the letters of `reasons` say how each ended."""
    samples = []
    for number, text in enumerate(texts):
        plain = sample(text, output_tokens=len(text.split()))
        reason = {"s": "stop", "l": "length"}[reasons[number % len(reasons)]]
        earlier = tuple(results.Turn(f"earlier {n} of {text}", "stop", 3 + n, 2) for n in range(turns))
        samples.append(
            results.SampleResult(text, reason, 3, plain.output_tokens, plain.stats, plain.nodes, turns=earlier)
        )
    return results.RowResult(row.request_id, tuple(samples))


def exported(database: Database, settings: Settings, job_id: str, name: str, **said: Any) -> DataSet:
    target = settings.home.parent / name
    done = export_dataset(database, settings, job_id, target, ExportOptions(**said))
    check(done)
    return done


def check(done: DataSet) -> None:
    """The counts add up, and the files hold what was counted."""
    counts = done.counts.as_dict()
    assert counts["answers"] == counts["written"] + sum(counts["removed"].values())
    assert counts["written"] == counts["train"] + counts["test"]
    assert len(read(done.train)) == counts["train"]
    assert done.test is not None or counts["test"] == 0
    if done.test is not None:
        assert len(read(done.test)) == counts["test"]


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        table.validate(full=True)
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(database: Database, settings: Settings) -> str:
    """Six rows of two samples each; row 2 failed, row 5 was refused at submit."""
    answers = {
        0: ["Red is a colour.", "red  is a COLOUR."],
        1: ["An apple, sweet and round, that grows on trees in most cold gardens of the world.", "A pear."],
        3: ["An oak.", "An elm"],
        4: ["A cod 1.", "A cod 2."],
    }
    submitted = submit_table(
        database, settings, {"task": [*TASKS[:5], None], "key": range(6)}, prompt_column="task",
        sampling={"n": 2}, id_column="key", system="Be short: {{ key }}.",
    )  # fmt: skip

    def answer(row: results.PendingRow) -> results.RowResult:
        if row.row_index not in answers:
            return failed(row)
        return answered(row, answers[row.row_index], "sl" if row.row_index == 3 else "s")

    drain(database, answer)
    return submitted.job_id


def test_every_answer_of_a_job_becomes_a_conversation(database: Database, settings: Settings, job: str) -> None:
    done = exported(database, settings, job, "sft.jsonl", format="messages")
    rows = read(done.train)
    assert rows[0] == {
        "messages": [
            {"role": "system", "content": "Be short: 0."},
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Red is a colour."},
        ]
    }
    assert [row["messages"][1]["content"] for row in rows] == [TASKS[n] for n in (0, 0, 1, 1, 3, 3, 4, 4)]
    assert done.counts.as_dict() == {
        "rows": 6, "rows_failed": 2, "rows_cancelled": 0, "rows_waiting": 0, "answers": 8,
        "removed": dict.fromkeys(
            ["finish_reason", "min_chars", "max_chars", "min_tokens", "max_tokens", "match", "no_match",
             "match_timeout", "exact_duplicate", "near_duplicate"], 0,
        ),
        "train": 8, "test": 0, "written": 8,
    }  # fmt: skip


def test_parquet_and_sharegpt_say_the_same_beside_the_columns_that_were_asked_for(
    database: Database, settings: Settings, job: str
) -> None:
    done = exported(
        database, settings, job, "sft.parquet", format="sharegpt", column=["key", "forq_output_tokens", "key"]
    )
    schema = pq.read_schema(done.train)
    assert schema.names == ["conversations", "key", "forq_output_tokens"]
    assert schema.field("conversations").type == pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    assert read(done.train)[3] == {
        "conversations": [
            {"from": "system", "value": "Be short: 1."},
            {"from": "human", "value": "Name a fruit."},
            {"from": "gpt", "value": "A pear."},
        ],
        "key": 1,
        "forq_output_tokens": 2,
    }


def test_each_step_takes_its_own_and_is_counted(database: Database, settings: Settings, job: str) -> None:
    done = exported(
        database, settings, job, "sft.jsonl", format="messages", finish_reason="stop", min_chars=7, max_tokens=12,
        no_match="2", dedup="exact",
    )  # fmt: skip
    removed = {name: number for name, number in done.counts.removed.items() if number}
    assert removed == {"finish_reason": 1, "max_tokens": 1, "no_match": 1, "exact_duplicate": 1}
    assert [row["messages"][-1]["content"] for row in read(done.train)] == [
        "Red is a colour.", "A pear.", "An oak.", "A cod 1."
    ]  # fmt: skip


def test_duplicates_may_be_looked_for_in_whole_conversations(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, {"prompt": ["one", "two", "two"]}).job_id
    drain(database, lambda row: answered(row, ["same"]))
    alone = exported(database, settings, job_id, "a.jsonl", format="messages", dedup="exact")
    whole = exported(
        database, settings, job_id, "b.jsonl", format="messages", dedup="exact", dedup_on="conversation"
    )  # fmt: skip
    assert (alone.counts.written, whole.counts.written) == (1, 2)


def test_near_duplicates_are_counted_apart_from_exact_ones(database: Database, settings: Settings) -> None:
    words = [f"w{n}" for n in range(100)]
    changed = [*words[:50], "other", *words[51:]]
    texts = [" ".join(words), " ".join(changed), " ".join(words).upper(), "short"]
    job_id = submit_table(database, settings, {"prompt": ["a", "b", "c", "d"]}).job_id
    drain(database, lambda row: answered(row, [texts[row.row_index]]))
    done = exported(database, settings, job_id, "a.jsonl", format="messages", dedup="near")
    assert {name: number for name, number in done.counts.removed.items() if number} == {
        "exact_duplicate": 1, "near_duplicate": 1
    }  # fmt: skip
    strict = exported(database, settings, job_id, "b.jsonl", format="messages", dedup="near", near_threshold=1.0)
    assert strict.counts.written == 3


def test_earlier_answers_are_in_the_conversation_and_in_a_column_of_their_own(
    database: Database, settings: Settings
) -> None:
    job_id = submit_table(
        database, settings, {"prompt": ["one", "two"]}, turn=("And {{ prompt }}?", "So: {{ answers[0] }}!")
    ).job_id
    drain(database, lambda row: answered(row, ["end"], turns=2) if row.row_index else failed(row))
    done = exported(database, settings, job_id, "a.jsonl", format="messages", column=["forq_turns"])
    assert read(done.train) == [
        {
            "messages": [
                {"role": "user", "content": "two"},
                {"role": "assistant", "content": "earlier 0 of end"},
                {"role": "user", "content": "And two?"},
                {"role": "assistant", "content": "earlier 1 of end"},
                {"role": "user", "content": "So: earlier 0 of end!"},
                {"role": "assistant", "content": "end"},
            ],
            "forq_turns": [
                {"content": "earlier 0 of end", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 2},
                {"content": "earlier 1 of end", "finish_reason": "stop", "prompt_tokens": 4, "output_tokens": 2},
            ],
        }
    ]


def test_the_plain_formats_can_be_filtered_too_with_all_their_columns(
    database: Database, settings: Settings, job: str
) -> None:
    done = exported(database, settings, job, "kept.parquet", finish_reason="length")
    (row,) = read(done.train)
    assert (row["key"], row["forq_output"], row["forq_sample"]) == (3, "An elm", 1)
    assert "forq_request" not in row
    chosen = exported(database, settings, job, "few.jsonl", match="o", column=["forq_output"])
    assert [list(row) for row in read(chosen.train)] == [["forq_output"]] * chosen.counts.written


def test_all_samples_of_a_row_are_on_one_side_the_same_in_every_run(database: Database, settings: Settings) -> None:
    prompts = [f"question {n}" for n in range(40)]
    job_id = submit_table(database, settings, {"prompt": [*prompts, prompts[0]]}, sampling={"n": 3}).job_id
    drain(database, lambda row: answered(row, [f"{row.row_index} {n}" for n in range(3)]))
    sides: list[set[str]] = []
    for name in ("one.jsonl", "two.parquet"):
        done = exported(database, settings, job_id, name, format="messages", test_share=0.3)
        assert done.test == done.train.with_name(f"{done.train.stem}.test{done.train.suffix}")
        train, test = (Counter(row["messages"][0]["content"] for row in read(path)) for path in (done.train, done.test))
        assert not train.keys() & test.keys()
        assert all(number == (6 if asked == prompts[0] else 3) for asked, number in (train + test).items())
        assert 3 < len(test) < 25
        sides.append({*test})
    assert sides[0] == sides[1]


def test_a_split_may_go_into_a_folder(database: Database, settings: Settings, job: str) -> None:
    done = exported(database, settings, job, "sft", format="messages", test_share=0.5)
    assert [done.train.name, done.test and done.test.name] == ["train.parquet", "test.parquet"]
    assert sorted(path.name for path in (settings.home.parent / "sft").iterdir()) == ["test.parquet", "train.parquet"]


def test_files_of_another_split_are_not_left_to_be_taken_for_this_ones(
    database: Database, settings: Settings, job: str
) -> None:
    folder = settings.home.parent / "sft"
    exported(database, settings, job, "sft", format="messages", test_share=0.5)
    exported(database, settings, job, "sft", format="sharegpt", test_share=0.5)  # the same files, anew
    with pytest.raises(BadInput, match=r"has train\.parquet and test\.parquet of an export in another format: remove"):
        exported(database, settings, job, "sft", format="jsonl", test_share=0.5)
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    exported(database, settings, job, "a.jsonl", test_share=0.5)
    with pytest.raises(BadInput, match=r"a\.test\.jsonl lies beside a\.jsonl, the test side of another split"):
        exported(database, settings, job, "a.jsonl", min_chars=1)


def test_rows_that_wait_or_were_cancelled_are_counted_and_not_written(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, {"prompt": [f"q{n}" for n in range(10)]}).job_id
    run_shard(database, acquire(database), lambda row: answered(row, ["yes"]))
    waiting = exported(database, settings, job_id, "a.jsonl", format="messages").counts
    assert (waiting.rows, waiting.answers, waiting.rows_waiting, waiting.written) == (10, 4, 6, 4)
    cancel(database, job_id)
    ended = exported(database, settings, job_id, "b.jsonl", format="messages").counts
    assert (ended.rows, ended.answers, ended.rows_cancelled, ended.rows_waiting) == (10, 4, 6, 0)


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("a.jsonl", {"column": ["kei"]}, "there is no column 'kei' to keep; did you mean 'key'"),
        ("a.jsonl", {"column": ["forq_request"]}, "there is no column 'forq_request'"),
        ("a.txt", {}, "the suffix is '.txt'"),
        ("missing/a.jsonl", {}, "not a file in a folder that exists"),
        ("folder", {}, "a folder is for a split"),
        ("missing/folder", {"test_share": 0.5}, "not in a folder that exists"),
        ("a.jsonl", {"match": ["("]}, "no regular expression"),
    ],
)
def test_what_cannot_be_written_is_refused_with_one_line_and_nothing_is_left(
    database: Database, settings: Settings, job: str, name: str, said: dict[str, Any], message: str
) -> None:
    before = sorted(settings.home.parent.iterdir())
    with pytest.raises(BadInput, match=message) as raised:
        export_dataset(database, settings, job, settings.home.parent / name, ExportOptions(format="messages", **said))
    assert "\n" not in str(raised.value)
    assert sorted(settings.home.parent.iterdir()) == before


def test_a_column_named_messages_is_not_written_beside_the_conversation(database: Database, settings: Settings) -> None:
    table = {"messages": [[{"role": "user", "content": "Hi"}]]}
    job_id = submit_table(database, settings, table).job_id
    drain(database, lambda row: answered(row, ["Hello"]))
    assert exported(database, settings, job_id, "a.parquet", format="messages").counts.written == 1
    with pytest.raises(BadInput, match="has the name of the conversation's own"):
        exported(database, settings, job_id, "b.parquet", format="messages", column=["messages"])


def test_an_unknown_job_or_a_file_that_cannot_be_written_is_said(
    database: Database, settings: Settings, job: str
) -> None:
    folder = settings.home.parent
    with pytest.raises(NotFound):
        export_dataset(database, settings, "0" * 26, folder / "a.jsonl", ExportOptions(format="messages"))
    (folder / "full.jsonl").symlink_to("/dev/full/x")
    (folder / "d.jsonl").mkdir()
    with pytest.raises((Unavailable, BadInput)):
        export_dataset(database, settings, job, folder / "d.jsonl", ExportOptions(format="messages"))
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


said_options = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": st.sampled_from(["stop", "length"]),
        "min_chars": st.integers(0, 12),
        "max_tokens": st.integers(0, 6),
        "match": st.sampled_from(["a", "[0-9]", "^x"]),
        "no_match": st.sampled_from(["b", "e$"]),
        "dedup": st.sampled_from(["exact", "near"]),
        "dedup_on": st.sampled_from(["answer", "conversation"]),
        "test_share": st.sampled_from([0.1, 0.5, 0.9]),
        "format": st.sampled_from(["messages", "sharegpt", "parquet"]),
    },
)


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=said_options)
def test_whatever_is_asked_for_the_counts_add_up_and_nothing_is_written_twice(
    database: Database, settings: Settings, job: str, said: dict[str, Any]
) -> None:
    (settings.home.parent / "any.test.parquet").unlink(missing_ok=True)
    done = exported(database, settings, job, "any.parquet", **said, column=["forq_output", "key", "forq_sample"])
    written = [
        (row["key"], row["forq_sample"]) for path in (done.train, done.test) if path is not None for row in read(path)
    ]
    assert len({*written}) == len(written) == done.counts.written
    if "dedup" in said and said.get("dedup_on") != "conversation":
        texts = [row["forq_output"].casefold() for path in (done.train, done.test) if path for row in read(path)]
        assert len({*texts}) == len(texts)
