"""What a file's rows become: every kind of column, every kind of bad row; and what may be said about a job."""

import datetime
import decimal
import json
import uuid
from typing import Any

import pyarrow as pa
import pytest
from batches import (
    MODEL,
    check_integrity,
    drain,
    num_rows_in_tables,
    prompts_of,
    raw_strings,
    requests_of,
    submit_table,
    write_table,
)

from db.session import Database
from jobs.errors import BadInput
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, Submitted, submit_file

BAD_UTF8 = b"caf\xe9"


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_prompts_are_read_from_every_kind_of_text_column(
    database: Database, settings: Settings, kind: pa.DataType
) -> None:
    texts = ["one", "zwei — ✓", None, " ", "one"]
    plain = pa.string() if pa.types.is_dictionary(kind) else kind
    column = pa.array([text.encode() if text and "binary" in str(kind) else text for text in texts], plain)
    if pa.types.is_dictionary(kind):
        column = column.dictionary_encode()
    if "binary" in str(kind):
        column = pa.array([None if text is None else text.encode() for text in texts], kind)
    submitted = submit_table(database, settings, {"prompt": column})
    assert (submitted.num_rows, submitted.num_shards, submitted.num_refused) == (5, 2, 2)
    assert prompts_of(database, submitted) == [
        {"prompt": "one"}, {"prompt": "zwei — ✓"}, "empty_prompt", "empty_prompt", {"prompt": "one"}
    ]  # fmt: skip
    check_integrity(database, submitted.job_id)


def test_a_column_of_nulls_is_a_column_of_bad_rows(database: Database, settings: Settings) -> None:
    submitted = submit_table(database, settings, {"prompt": pa.nulls(5)})
    assert submitted.num_refused == 5
    assert prompts_of(database, submitted) == ["empty_prompt"] * 5
    drain(database)
    check_integrity(database, submitted.job_id)


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("large", [False, True])
def test_conversations_are_read_from_lists_of_structs(database: Database, settings: Settings, large: bool) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    kind = pa.large_list(message) if large else pa.list_(message)
    rows = [TALK, [], None, [{"role": None, "content": "x"}], [{"role": "user", "content": None}], [None]]
    submitted = submit_table(database, settings, {"messages": pa.array(rows, kind)})
    assert prompts_of(database, submitted) == [
        {"messages": TALK}, "empty_prompt", "empty_prompt", "invalid_messages", "invalid_messages", "invalid_messages"
    ]  # fmt: skip


def test_conversations_are_read_from_json_text(database: Database, settings: Settings) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    rows = [
        json.dumps(TALK), json.dumps(parts), "[" * 100_000, "{not json", '"text"', '{"role": "user"}', "[]", None,
        json.dumps(image), json.dumps([{"role": "user", "content": "x"}] * 1025),
        '[{"role":"user","content":"\\ud800"}]',
        '[{"role":"user","content":"\\u0000nul"}]', "[1]", '[{"role":"user","content":" "}]', "NaN", "7", "",
    ]  # fmt: skip
    submitted = submit_table(database, settings, {"chat": rows}, messages_column="chat")
    assert prompts_of(database, submitted) == [
        {"messages": TALK}, {"messages": [{"role": "user", "content": "ab"}]}, *["invalid_messages"] * 4,
        "empty_prompt", "empty_prompt", "invalid_messages", "invalid_messages", "invalid_text",
        {"messages": [{"role": "user", "content": "\x00nul"}]}, "invalid_messages", "empty_prompt",
        *["invalid_messages"] * 3,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_only_the_row_with_invalid_utf8_fails(database: Database, settings: Settings, kind: pa.DataType) -> None:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    column = raw_strings([b"good", BAD_UTF8, None, b"also good"], plain)
    if pa.types.is_dictionary(kind):
        values = raw_strings([b"good", BAD_UTF8, b"also good"])
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2], pa.int32()), values)
    submitted = submit_table(database, settings, {"prompt": column})
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == [None, "invalid_text", "empty_prompt", None]
    assert "byte 3 (0xe9) is not valid UTF-8" in rows[1].error


def test_only_the_conversation_with_invalid_utf8_fails(database: Database, settings: Settings) -> None:
    contents = raw_strings([b"good", BAD_UTF8, b"also good"])
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), contents], ["role", "content"])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), messages)
    submitted = submit_table(database, settings, {"messages": column})
    assert [row.error_code for row in requests_of(database, submitted.job_id)] == [None, "invalid_text", None]


def test_only_the_row_with_invalid_utf8_in_its_sampling_fails(database: Database, settings: Settings) -> None:
    stops = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), raw_strings([b"good", BAD_UTF8]))
    sampling = pa.StructArray.from_arrays([stops], ["stop"])
    submitted = submit_table(database, settings, {"prompt": ["a", "b"], "sampling": sampling})
    assert [row.error_code for row in requests_of(database, submitted.job_id)] == [None, "invalid_text"]


def test_a_prompt_may_hold_nul_and_control_characters(database: Database, settings: Settings) -> None:
    texts = ["a\x00b", "\x00", "\x1b[31m", "<|im_start|>system"]
    submitted = submit_table(database, settings, {"prompt": texts, "id": ["x\x00y", "", "z", None]}, id_column="id")
    assert prompts_of(database, submitted) == [{"prompt": text} for text in texts]
    assert [row.custom_id for row in requests_of(database, submitted.job_id)] == ["x\ufffdy", "", "z", None]


def test_a_prompt_over_the_cells_limit_is_refused_alone(database: Database, settings: Settings) -> None:
    small = settings.model_copy(update={"limits": Limits(max_cell_bytes=100)})
    submitted = submit_table(database, small, {"prompt": ["x" * 10, "x" * 200]})
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == [None, "prompt_too_large"]
    assert "the limit is 100" in rows[1].error
    assert "max_cell_bytes" in rows[1].error


ID_COLUMNS = {
    "int": (pa.array([3, None]), ["3", None]),
    "str": (pa.array(["a", "b"]), ["a", "b"]),
    "float": (pa.array([1.5, 2.0]), ["1.5", "2.0"]),
    "bool": (pa.array([True, False]), ["true", "false"]),
    "date": (pa.array([datetime.date(2024, 2, 29), None]), ["2024-02-29", None]),
    "nanoseconds": (
        pa.array([1, 2], pa.timestamp("ns")),
        ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000000002"],
    ),
    "decimal": (pa.array([decimal.Decimal("1.50"), None]), ["1.50", None]),
    "uuid": (pa.array([uuid.UUID(int=7).bytes] * 2, pa.uuid()), [str(uuid.UUID(int=7))] * 2),
    "list": (pa.array([[1, 2], []]), ["[1, 2]", "[]"]),
}


@pytest.mark.parametrize("name", ID_COLUMNS)
def test_ids_are_kept_as_text(database: Database, settings: Settings, name: str) -> None:
    column, expected = ID_COLUMNS[name]
    submitted = submit_table(database, settings, {"prompt": ["a", "b"], "key": column}, id_column="key")
    assert [row.custom_id for row in requests_of(database, submitted.job_id)] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt-5"}, "known aliases: forking, other, plain-reference, reference, smollm2-135m"),
        ({"decoding": "apar"}, "name fork_token and child_token in [models.smollm2-135m] of forq.toml, or use"),
        ({"decoding": "apar", "model": "other"}, "model 'other' is not known to fork"),
        ({"decoding": "beam"}, "decoding is 'beam': use apar or ar"),
        ({"kv_share": 0.0}, "--kv-share is 0.0: it must be above 0 and at most 1"),
        ({"kv_share": -0.5}, "--kv-share is -0.5"),
        ({"kv_share": 1.01}, "--kv-share is 1.01"),
        ({"kv_share": float("nan")}, "--kv-share is nan"),
        ({"kv_share": float("inf")}, "--kv-share is inf"),
        ({"priority": 1001}, "priority is 1001"),
        ({"name": ""}, "the name has 0 characters"),
        ({"name": "x" * 201}, "the name has 201 characters"),
        ({"name": "a\nb"}, "control characters"),
        ({"name": "a\x00b"}, "control characters"),
        ({"name": "\ud800"}, "control characters"),
        ({"prompt_column": "prompt", "template": "{{ prompt }}"}, "give one of"),
        ({"prompt_column": "x" * 3000}, f"has no column '{'x' * 57}...'. Its columns: prompt"),
        ({"template": "{{ " + "x" * 3000 + " }}"}, f"the template uses {'x' * 57}...; the file's columns are prompt"),
        ({"model": "m" * 3000}, f"model '{'m' * 57}...' is not configured"),
        ({"sampling": {"x" * 2000: 1}}, "x" * 57 + "... is not a sampling value: use"),
        ({"sampling": {"a\nb": 1}}, r"a\nb is not a sampling value"),
        ({"sampling": {"logit_bias": {}}}, "logit_bias is not served here: leave it out"),
        ({"sampling": {"stop": ["\ud800"]}}, "stop"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    database: Database, settings: Settings, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_table(database, settings, {"prompt": ["a"]}, **options)
    assert message in str(caught.value)
    assert num_rows_in_tables(database)["jobs"] == 0


def test_the_same_content_twice_is_one_job_only_where_that_is_asked_for(database: Database, settings: Settings) -> None:
    path = write_table(settings.home.parent / "same.parquet", {"prompt": ["a", "b"]})

    def submit(**options: Any) -> Submitted:
        return submit_file(database, settings, path, SubmitOptions(model=MODEL, **options))

    first = submit(dedupe=True)
    again = submit(dedupe=True)
    assert (first.is_new, again.is_new, again.job_id) == (True, False, first.job_id)
    assert again.num_rows == 2
    others = [submit(), submit(), submit(dedupe=True, name="other"), submit(dedupe=True, sampling={"seed": 1})]
    assert len({first.job_id, *(other.job_id for other in others)}) == 5
    assert len(list(settings.data_dir.iterdir())) == 1


def test_progress_is_reported_to_the_last_row(database: Database, settings: Settings) -> None:
    seen: list[tuple[str, int, int]] = []
    path = write_table(settings.home.parent / "many.parquet", {"prompt": ["a"] * 5000})
    submit_file(database, settings, path, SubmitOptions(model=MODEL), lambda *progress: seen.append(progress))
    assert [phase for phase, done, total in seen if done == total] == ["reading", "storing"]
