"""OpenAI batch files: lines become rows, a bad line is named."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from batches import (
    MODEL,
    num_rows_in_tables,
    requests_of,
)

from db.session import Database
from jobs.errors import BadInput
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, Submitted, submit_file

BAD_UTF8 = b"caf\xe9"


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
        (line("unknown", logit_bias={"1": 5}), "invalid_sampling"),
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
        ('{"custom_id": "a\\u0000", "url": "", "body": {}}', "custom_id holds a NUL character: leave it out"),
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
