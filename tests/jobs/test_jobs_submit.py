"""What a file's rows become: every kind of column, every kind of bad row."""

import contextlib
import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from batches import MODEL, acquire, check_integrity, drain, num_rows_in_tables, requests_of, submit_table, write_table

from db.session import Database
from jobs import results
from jobs.errors import BadInput
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, Submitted, check_options, submit_file

BAD_UTF8 = b"caf\xe9"


def prompts_of(database: Database, submitted: Submitted) -> list[Any]:
    return [
        json.loads(row.payload) if row.payload else row.error_code for row in requests_of(database, submitted.job_id)
    ]


def raw_strings(values: list[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """A string column from bytes that nobody checked, as a careless writer makes it."""
    binary = pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary())
    return pa.Array.from_buffers(kind or pa.string(), len(binary), binary.buffers())


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


# --- sampling -----------------------------------------------------------------------------------------------------

BAD_SAMPLING: list[tuple[str, Any, str]] = [
    ("temperature", float("nan"), "temperature: must be a finite number, not nan"),
    ("temperature", float("inf"), "temperature"),
    ("temperature", -0.1, "temperature is -0.1: it should be greater than or equal to 0"),
    ("temperature", 2.1, "temperature is 2.1: it should be less than or equal to 2"),
    ("temperature", True, "temperature: must be a number, not true or false"),
    ("top_p", 0.0, "top_p is 0.0: it should be greater than 0"),
    ("top_p", 1.01, "top_p is 1.01: it should be less than or equal to 1"),
    ("top_p", float("-inf"), "top_p"),
    ("max_tokens", 0, "max_tokens is 0: it should be greater than or equal to 1"),
    ("max_tokens", -5, "max_tokens is -5"),
    ("max_tokens", 128.5, "max_tokens: must be a whole number, not 128.5"),
    ("max_tokens", float("nan"), "max_tokens: must be a whole number, not nan"),
    ("max_tokens", float("inf"), "max_tokens: must be a whole number, not inf"),
    ("max_tokens", True, "max_tokens: must be a number, not true or false"),
    (
        "max_tokens",
        10**9,
        "max_tokens is 1000000000, the limit is 131072: ask for fewer or raise limits.max_max_tokens",
    ),
    ("n", 0, "n is 0"),
    ("n", 65, "n is 65, the limit is 64: ask for fewer samples or raise limits.max_n"),
    ("seed", -1, "seed is -1"),
    ("top_k", -2, "top_k is -2"),
    ("min_p", 1.5, "min_p is 1.5"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0"),
    ("presence_penalty", 2.5, "presence_penalty is 2.5"),
    ("stop", [""], "a stop string has 0 characters: 1 to 256 are allowed"),
    ("stop", ["x"] * 17, "stop has 17 strings, the limit is 16"),
    ("stop", ["x" * 257], "a stop string has 257 characters"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_SAMPLING)
def test_a_rows_bad_sampling_value_fails_that_row_and_names_value_and_limit(
    database: Database, settings: Settings, name: str, value: Any, message: str
) -> None:
    sampling = pa.array([{name: value}, None, {name: None}])
    submitted = submit_table(database, settings, {"prompt": ["a", "b", "c"], "sampling": sampling})
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == ["invalid_sampling", None, None]
    assert message in rows[0].error
    assert rows[1].sampling is rows[2].sampling is None


@pytest.mark.parametrize(("name", "value", "message"), BAD_SAMPLING)
def test_a_bad_flag_is_refused_at_once(settings: Settings, name: str, value: Any, message: str) -> None:

    with pytest.raises(BadInput) as caught:
        check_options(settings, SubmitOptions(model=MODEL, sampling={name: value}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_written_as_floats_are_whole_numbers(database: Database, settings: Settings) -> None:
    sampling = pa.array([{"max_tokens": 128.0, "seed": 7.0, "temperature": 0.5}, {"max_tokens": None}])
    submitted = submit_table(database, settings, {"prompt": ["a", "b"], "sampling": sampling})
    row = requests_of(database, submitted.job_id)[0]
    assert json.loads(row.sampling) == {"max_tokens": 128, "seed": 7, "temperature": 0.5}


def test_a_rows_sampling_lies_over_the_jobs(database: Database, settings: Settings) -> None:

    sampling = pa.array([{"temperature": 0.0, "stop": ["\n"]}, None, {"temperature": None, "stop": None}])
    columns = {"prompt": ["a", "b", "c"], "sampling": sampling}
    submit_table(database, settings, columns, sampling={"temperature": 1.0, "max_tokens": 9})
    said = [row.sampling.said() for row in results.load(database, acquire(database)).rows]
    assert said == [
        {"temperature": 0.0, "max_tokens": 9, "stop": ["\n"]},
        {"temperature": 1.0, "max_tokens": 9},
        {"temperature": 1.0, "max_tokens": 9},
    ]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([{"temprature": 1.0}]), "unknown field(s) temprature"),
        (pa.array(["{}"]), "column 'sampling' has type string"),
    ],
)
def test_a_sampling_column_of_another_shape_refuses_the_file(
    database: Database, settings: Settings, column: pa.Array, message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_table(database, settings, {"prompt": ["a"], "sampling": column})
    assert message in str(caught.value)


# --- templates ----------------------------------------------------------------------------------------------------


def test_a_template_renders_each_row(database: Database, settings: Settings) -> None:
    columns = {
        "city": ["Rome", "Oslo"],
        "n": [1, 2],
        "tags": [["a", "b"], []],
        "at": pa.array([1, 2], pa.timestamp("ns")),
    }
    template = "{{ n }}. {{ city | upper }}{% for tag in tags %} #{{ tag }}{% endfor %} {{ at }}\n"
    submitted = submit_table(database, settings, columns, template=template)
    assert prompts_of(database, submitted) == [
        {"prompt": "1. ROME #a #b 1970-01-01 00:00:00.000000001\n"},
        {"prompt": "2. OSLO 1970-01-01 00:00:00.000000002\n"},
    ]


def test_a_template_that_fails_on_a_row_fails_that_row(database: Database, settings: Settings) -> None:
    columns = {"values": [[1, 2], [], None, [3]]}
    submitted = submit_table(database, settings, columns, template="first: {{ values | sum // values | length }}")
    assert prompts_of(database, submitted) == [
        {"prompt": "first: 1"}, "template_failed", "template_failed", {"prompt": "first: 3"}
    ]  # fmt: skip


def test_an_error_that_quotes_the_row_is_stored_whatever_the_row_holds(database: Database, settings: Settings) -> None:
    columns = {"text": ["a\x00b", "line\nbreak", "x" * 5000, "good"]}
    template = "{% if text != 'good' %}{{ cycler(1)[text].format(text) }}{{ {}[text].x }}{% endif %}{{ text }}"
    submitted = submit_table(database, settings, columns, template=template)
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == ["template_failed"] * 3 + [None]
    assert all(len(row.error) <= 1000 and "\n" not in row.error and "\x00" not in row.error for row in rows[:3])


def test_invalid_utf8_fails_the_template_of_its_row_alone(database: Database, settings: Settings) -> None:
    columns = {"text": raw_strings([b"good", BAD_UTF8]), "unused": raw_strings([BAD_UTF8, BAD_UTF8])}
    submitted = submit_table(database, settings, columns, template="Q: {{ text }}")
    assert prompts_of(database, submitted) == [{"prompt": "Q: good"}, "invalid_text"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ (prompt | attr('__class__')).__name__ }}",
        "{{ '%s' | format(prompt.__init__.__globals__) }}",
        "{{ '{0.__class__}'.format(prompt) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ 'x' * 10**10 }}",
        "{{ [prompt] * 99999999 }}",
        "{{ 10**10**10 }}",
        "{{ range(10**9) | list }}",
        "{% include 'secrets' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(database: Database, settings: Settings, template: str) -> None:
    submitted = submit_table(database, settings, {"prompt": ["a"]}, template=template)
    assert prompts_of(database, submitted) == ["template_failed"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ promt }}", "the template uses promt; the file's columns are prompt"),
        ("{{ prompt", "does not parse"),
        ("{{ prompt | nofilter }}", "does not parse"),
        ("{% if %}", "does not parse"),
        ("{{ " + "(" * 5000 + " }}", "does not parse"),
        ("x" * ((1 << 20) + 1), "the limit is 1048576"),
    ],
    ids=["column", "open", "filter", "if", "nested", "long"],
)
def test_a_template_that_can_never_work_is_refused_at_submit(
    database: Database, settings: Settings, template: str, message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_table(database, settings, {"prompt": ["a"]}, template=template)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arithmetic_in_a_template_still_works(database: Database, settings: Settings) -> None:
    submitted = submit_table(
        database, settings, {"n": [3]}, template="{{ n * 2 }} {{ n ** 2 }} {{ '-' * n }} {{ n * 1.5 }}"
    )
    assert prompts_of(database, submitted) == [{"prompt": "6 9 --- 4.5"}]


# --- options ------------------------------------------------------------------------------------------------------


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
        ({"sampling": {"logit_bias": {}}}, "logit_bias is not a sampling value"),
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


# --- OpenAI batch lines -------------------------------------------------------------------------------------------


def line(custom_id: str = "a", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Why?"}], **body} if "chat" in url else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def submit_lines(database: Database, settings: Settings, lines: list[Any], tmp_path: Path) -> Submitted:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(value if isinstance(value, str) else json.dumps(value) for value in lines))
    return submit_file(database, settings, path, SubmitOptions(model=MODEL))


def test_batch_lines_become_rows(database: Database, settings: Settings, tmp_path: Path) -> None:
    lines = [
        line("a", max_tokens=5, temperature=0, model=MODEL),
        "",
        line("b", max_completion_tokens=7, n=2, stop="\n"),
        line("c", "/v1/completions", prompt="Once upon"),
    ]
    submitted = submit_lines(database, settings, lines, tmp_path)
    rows = requests_of(database, submitted.job_id)
    assert [row.custom_id for row in rows] == ["a", "b", "c"]
    assert [json.loads(row.payload) for row in rows] == [
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"prompt": "Once upon", "raw": True},
    ]
    assert [row.sampling and json.loads(row.sampling) for row in rows] == [
        {"max_tokens": 5, "temperature": 0.0}, {"max_tokens": 7, "n": 2, "stop": ["\n"]}, None
    ]  # fmt: skip


def test_a_bad_body_fails_its_line_alone(database: Database, settings: Settings, tmp_path: Path) -> None:
    bad = [
        (line("model", model="gpt-5"), "invalid_request"),
        (line("stream", stream=True), "invalid_request"),
        (line("url", "/v1/embeddings", input="x"), "invalid_request"),
        ({**line("method"), "method": "GET"}, "invalid_request"),
        (line("unknown", logprobs=True), "invalid_sampling"),
        ('{"custom_id":"nul key","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"a\\u0000b":1}}', "invalid_sampling"),
        ('{"custom_id":"half key","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"\\ud800":1}}', "invalid_sampling"),
        ('{"custom_id":"half stop","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"stop":["\\ud800"]}}', "invalid_sampling"),
        ('{"custom_id":"half text","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"\\ud800"}]}}', "invalid_text"),
        ('{"custom_id":"nan","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"temperature":NaN}}', "invalid_sampling"),
        ('{"custom_id":"inf","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"max_tokens":1e999}}', "invalid_sampling"),
        ('{"custom_id":"long","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":[{"role":"user","content":"x"}],"max_tokens":1' + "0" * 4000 + "}}", "invalid_sampling"),
        ('{"custom_id":"deep","method":"POST","url":"/v1/chat/completions",'
         '"body":{"messages":' + "[" * 700 + "]" * 700 + "}}", None),
        (line("no messages", messages=None), "empty_prompt"),
        (line("no prompt", "/v1/completions"), "empty_prompt"),
        (line("prompts", "/v1/completions", prompt=["a", "b"]), "invalid_prompt"),
    ]  # fmt: skip
    submitted = submit_lines(database, settings, [line("good"), *(text for text, _ in bad)], tmp_path)
    rows = requests_of(database, submitted.job_id)
    assert rows[0].error_code is None
    for row, (_, code) in zip(rows[1:], bad, strict=True):
        assert row.error_code is not None, row.custom_id
        assert code is None or row.error_code == code, (row.custom_id, row.error)
        assert len(row.error) <= 1000


GOOD_LINE = json.dumps(line())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "batch.jsonl has 0 lines: at least 1 is needed"),
        ("\n \n", "batch.jsonl has 0 lines"),
        (GOOD_LINE + "\n{oops", "batch.jsonl line 2 is not JSON"),
        (GOOD_LINE + "\n\n" + GOOD_LINE, "line 3: custom_id 'a' occurs twice"),
        ("[1]", "line 1 is a JSON list"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"url": "/v1/chat/completions", "body": {}}', "'custom_id' is missing or not a string"),
        ('{"custom_id": 7, "url": "", "body": {}}', "'custom_id' is missing or not a string"),
        ('{"custom_id": "a", "url": "", "body": []}', "'body' is missing or not a JSON object"),
        ('{"custom_id": "\\ud800", "url": "", "body": {}}', "half of a surrogate pair"),
        ('{"custom_id": "a", "url": "", "body": {"max_tokens": 1' + "0" * 5000 + "}}", "line 1 is not JSON"),
        (b"\xff\xfe{}", "line 1 is not JSON"),
        (b"PAR1\x00\x01", "line 1 is not JSON"),
        (GOOD_LINE + "\n" + "x" * 70_000, "line 2 has over"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_broken_batch_file_is_refused_with_its_line(
    database: Database, settings: Settings, tmp_path: Path, content: str | bytes, message: str
) -> None:
    small = settings.model_copy(update={"limits": Limits(max_cell_bytes=500)})
    small = settings if "[[[" in str(content) else small
    path = tmp_path / "batch.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as caught:
        submit_file(database, small, path, SubmitOptions(model=MODEL))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert num_rows_in_tables(database)["jobs"] == 0
    assert not settings.data_dir.exists()


def test_every_depth_of_nesting_is_a_bad_row_or_a_bad_line(settings: Settings, templates: Any, tmp_path: Path) -> None:
    """Near the interpreter's recursion limit JSON that was read once may fail to be read again, deeper in the stack."""
    database = Database(templates.copy("sqlite", tmp_path))
    for depth in range(850, 1000, 5):
        nested = GOOD_LINE[:-2] + ', "x": ' + "[" * depth + "]" * depth + "}}"
        with contextlib.suppress(BadInput):
            assert submit_lines(database, settings, [nested], tmp_path).num_refused == 1
    database.dispose()
