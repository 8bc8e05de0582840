"""OpenAI's bodies: what is taken as which value, what is passed over, what is refused; and rows as lines again."""

import json
from pathlib import Path
from typing import Any

import pytest
from batches import MODEL, requests_of
from sqlalchemy import update

from db.models import Request
from db.session import Database
from db.states import RequestState
from jobs import leases, results
from jobs.batch_bodies import CHAT_URL, COMPLETIONS_URL, read_body
from jobs.batch_lines import EXPIRED, NEVER_LOGPROB, iter_lines
from jobs.export import export_job
from jobs.messages import RowError
from jobs.results import Node, RowResult, SampleResult, Stats
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file

HELLO = [{"role": "user", "content": "Hello"}]
NAMES = ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(url: str = CHAT_URL, decoding: str = "ar", **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"messages": HELLO, **body} if url == CHAT_URL else {"prompt": "Hello", **body}
    return read_body(json.dumps(body), url, NAMES, decoding)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": None, "max_tokens": 6}, {"max_tokens": 6}),
        ({"n": 2, "seed": 1, "stop": ["x"], "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1},
         {"n": 2, "seed": 1, "stop": ["x"], "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"structured": {"json_schema": {"type": "object"}}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
         {"structured": {"json_schema": SCHEMA}}),
        ({"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "stream_options": None}, {}),
        ({"stream": False, "tools": [], "logit_bias": {}, "tool_choice": "none", "parallel_tool_calls": True}, {}),
        ({"model": NAMES[1], "forq": {"decoding": "ar"}, "temperature": None}, {}),
        ({"tools": [{"type": "function"}]}, {"tools": [{"type": "function"}]}),  # refused as no sampling value
    ],
)  # fmt: skip
def test_fields_are_taken_or_passed_over(body: dict[str, Any], said: dict[str, Any]) -> None:
    assert read(**body) == ({"messages": HELLO}, said)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"model": "gpt-9"}, "another than the job's"),
        ({"stream": True}, "cannot stream"),
        ({"forq": {"decoding": "apar"}}, "'ar'"),
        ({"forq": {"colour": 1}}, "one key"),
        ({"forq": "apar"}, "one key"),
        ({"logprobs": 5}, "no true or false"),
        ({"top_logprobs": 5}, "without logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": 7}, "response_format"),
    ],
)
def test_what_is_not_served_is_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(RowError, match=text):
        read(**body)


def test_completions_say_logprobs_in_one_number_and_developers_are_the_system() -> None:
    assert read(COMPLETIONS_URL, logprobs=2, suffix="", echo=False, best_of=1) == (
        {"prompt": "Hello", "raw": True}, {"logprobs": 2},
    )  # fmt: skip
    said = read(messages=[{"role": "developer", "content": "Be brief."}, *HELLO])[0]["messages"][0]
    assert said == {"role": "system", "content": "Be brief."}


def test_bodies_that_are_none_are_refused() -> None:
    for text in ("null", "[]", "[" * 100_000, None):
        with pytest.raises(RowError):
            read_body(text, CHAT_URL, NAMES, "ar")  # type: ignore[arg-type]


def submit(database: Database, settings: Settings, tmp_path: Path, *bodies: dict[str, Any], source: str = "cli") -> str:
    lines = [
        {"custom_id": f"c{i}", "url": COMPLETIONS_URL if "prompt" in body else CHAT_URL, "body": body}
        for i, body in enumerate(bodies)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return submit_file(database, settings, path, SubmitOptions(model=MODEL, source=source)).job_id


def sample(**values: Any) -> SampleResult:
    stats = Stats(2, 1, 2, 3, 8, 1, 21, 8, 21, 0)
    told = {"text": 'say "x"\u2028', "finish_reason": "length", "prompt_tokens": 5, "output_tokens": 3, "stats": stats}
    return SampleResult(**{**told, "nodes": (Node(0, None, "root", 0, 0, 3, 0, 2, 0, 8),), **values})


def answer(database: Database, *samples: SampleResult) -> None:
    lease = leases.acquire(database, MODEL, "OWNER", 60.0)
    assert lease is not None
    rows = results.load(database, lease).rows
    results.write(database, lease, [RowResult(row.request_id, samples[: row.sampling.n or 1]) for row in rows])
    leases.finish(database, lease)


def test_rows_become_lines_of_their_endpoint(database: Database, settings: Settings, tmp_path: Path) -> None:
    told = [{"token": "é", "logprob": -0.5, "top": [{"token": "é", "logprob": -0.5}]},
            {"token": "x", "logprob": None, "top": []}]  # fmt: skip
    tricky = {"messages": [{"role": "user", "content": 'ends with "raw": true}'}]}
    job_id = submit(
        database, settings, tmp_path, {"messages": HELLO, "n": 2}, {"prompt": "p"}, tricky, {"prompt": "", "n": 1}
    )
    answer(database, sample(logprobs=json.dumps(told), cached_tokens=4), sample(text="", stats=None, nodes=()))
    lines = list(iter_lines(database, job_id))
    assert [line.is_answer for line in lines] == [True, True, True, False]
    assert (lines[0].input_tokens, lines[0].cached_tokens, lines[0].output_tokens) == (5, 4, 6)
    chat, text, third, refused = (json.loads(line.text) for line in lines)
    assert all(len(line.text.splitlines()) == 1 for line in lines)  # which splits at more than line ends
    body = chat["response"]["body"]
    assert [choice["message"]["content"] for choice in body["choices"]] == ['say "x"\u2028', ""]
    assert body["choices"][0]["finish_reason"] == "length"
    first = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert body["choices"][0]["logprobs"]["content"] == [
        {**first, "top_logprobs": [first]},
        {"token": "x", "logprob": NEVER_LOGPROB, "bytes": [120], "top_logprobs": []},
    ]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    receipt = body["forq"]["receipts"][0]
    assert (receipt["threads"], receipt["peak_cached_tokens"]) == (2, 8)
    assert body["forq"]["receipts"][1] is None
    assert text["response"]["body"]["object"] == "text_completion"
    assert text["response"]["body"]["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert third["response"]["body"]["object"] == "chat.completion"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["code"] == "empty_prompt"


def test_rows_that_wait_have_no_line_and_those_given_up_say_why(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    job_id = submit(database, settings, tmp_path, *[{"prompt": "p"}] * 3)
    assert list(iter_lines(database, job_id)) == []
    with database.write() as connection:
        connection.execute(update(Request).where(Request.row_index > 0).values(state=RequestState.CANCELLED))
    lines = [json.loads(line.text) for line in iter_lines(database, job_id, EXPIRED)]
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in lines] == [
        ("c1", None, "batch_expired"),
        ("c2", None, "batch_expired"),
    ]


def test_the_export_has_the_format_openai(database: Database, settings: Settings, tmp_path: Path) -> None:
    job_id = submit(database, settings, tmp_path, {"prompt": "p"}, {"prompt": ""}, {"prompt": "q"})
    answer(database, sample())
    target = tmp_path / "out.jsonl"
    assert export_job(database, settings, job_id, target, format="openai").num_rows == 3
    assert [json.loads(line)["custom_id"] for line in target.read_text().split("\n") if line] == ["c0", "c1", "c2"]
    assert export_job(database, settings, job_id, target, format="openai", failed_only=True).num_rows == 1
    assert json.loads(target.read_text())["custom_id"] == "c1"


def test_files_of_vllm_run_batch_may_call_the_model_by_its_name_on_the_hub_but_not_over_the_api(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    hub_id = settings.models[MODEL].hub_id
    body = {"model": hub_id, "messages": HELLO, "max_completion_tokens": 8}
    (row,) = requests_of(database, submit(database, settings, tmp_path, body))
    assert (row.error_code, json.loads(row.sampling)) == (None, {"max_tokens": 8})
    (row,) = requests_of(database, submit(database, settings, tmp_path, body, source="api"))
    assert row.error_code == "invalid_request"


def test_pages_are_small_where_rows_have_many_samples(database: Database, settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    asked = {"url": COMPLETIONS_URL, "body": {"prompt": "p"}}
    path.write_text("".join(json.dumps({"custom_id": str(i), **asked}) + "\n" for i in range(9)))
    job_id = submit_file(database, settings, path, SubmitOptions(model=MODEL, sampling={"n": 64})).job_id
    while True:
        lease = leases.acquire(database, MODEL, "OWNER", 60.0)
        if lease is None:
            break
        rows = results.load(database, lease).rows
        results.write(database, lease, [RowResult(row.request_id, (sample(),) * 64) for row in rows])
        leases.finish(database, lease)
    steps: list[int] = []
    lines = list(iter_lines(database, job_id, progress=lambda phase, done, total: steps.append(done)))
    assert steps == [4, 8, 9]
    assert [len(json.loads(line.text)["response"]["body"]["choices"]) for line in lines] == [64] * 9
