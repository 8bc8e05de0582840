"""POST /v1/jobs: what is taken, what is refused, and what it leaves behind."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import valkey
from api_support import MODEL, assert_problem, batch_lines, parquet_bytes, prompts
from sqlalchemy import select
from starlette.testclient import TestClient

from api.app import create_app
from db.models import Job
from db.session import Database
from jobs.doorbell import queue_name
from jobs.settings import Settings

BOUNDARY = "forq-boundary"


def left_behind(settings: Settings) -> list[Path]:
    return list((settings.home / "tmp").iterdir())


def post_raw(client: TestClient, body: Any, boundary: str | None = BOUNDARY) -> Any:
    kind = "multipart/form-data" + (f"; boundary={boundary}" if boundary is not None else "")
    return client.post("/v1/jobs", content=body, headers={"Content-Type": kind})


def part(disposition: bytes, body: bytes) -> bytes:
    return b"--forq-boundary\r\nContent-Disposition: form-data" + disposition + b"\r\n\r\n" + body + b"\r\n"


def file_part(body: bytes, name: bytes = b"a.parquet") -> bytes:
    return part(b'; name="file"; filename="' + name + b'"', body)


END = b"--forq-boundary--\r\n"


def post(client: TestClient, content: bytes | None = None, filename: str = "prompts.parquet", **fields: Any) -> Any:
    return client.post("/v1/jobs", files={"file": (filename, content or parquet_bytes())}, data=fields)


def test_a_parquet_file_becomes_a_queued_job_whose_location_answers(client: TestClient) -> None:
    response = post(client)
    status = response.json()
    assert response.status_code == 201
    assert status["state"] == "queued"
    assert status["model"] == MODEL
    assert status["counts"] == {"total": 3, "completed": 0, "failed": 0, "cancelled": 0}
    assert response.headers["location"] == f"/v1/jobs/{status['job_id']}"
    assert client.get(response.headers["location"]).json() == status


def test_batch_lines_are_known_by_their_suffix(client: TestClient) -> None:
    response = post(client, batch_lines(), "batch.jsonl")
    assert response.status_code == 201, response.text
    assert response.json()["counts"]["total"] == 2


def test_every_form_field_reaches_the_job(client: TestClient, database: Database) -> None:
    response = post(
        client, model=MODEL, prompt_column="prompt", id_column="key", decoding="ar", max_tokens="17",
        temperature="0.5", top_p="0.9", seed="7", n="2", priority="-3", name="näme 😀",
    )  # fmt: skip
    assert response.status_code == 201, response.text
    with database.read() as connection:
        job = connection.execute(select(Job.__table__)).one()
    assert job.sampling == {"max_tokens": 17, "temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2}
    assert job.mapping["column"] == "prompt"
    assert job.mapping["id_column"] == "key"
    assert (job.priority, job.name, job.source) == (-3, "näme 😀", "api")


def test_a_template_and_a_messages_column_are_ways_to_make_prompts(client: TestClient) -> None:
    assert post(client, template="Say {{ prompt }}\n{{ key }}").status_code == 201
    conversation = [{"role": "user", "content": "hello"}]
    table = pa.table({"talk": [conversation, conversation]})
    assert post(client, parquet_bytes(table), messages_column="talk").status_code == 201


def test_turns_are_fields_of_one_name_in_their_order(client: TestClient, database: Database) -> None:
    turns = ["More of {{ prompt }}.", "Shorten: {{ answers[0] }}"]
    response = post(client, system="You know {{ key }}.", turn=turns)
    assert response.status_code == 201, response.text
    with database.read() as connection:
        mapping = connection.execute(select(Job.mapping)).scalar_one()
    assert (mapping["system"], mapping["turn"]) == ("You know {{ key }}.", turns)
    assert post(client, turn="{{ answers[1] }}").status_code == 422
    assert "control characters" in post(client, turn=["fine", "a\x00b"]).text
    assert "given twice" in post(client, system=["one", "two"]).text


def test_the_doorbell_rings_on_the_models_queue(client: TestClient, settings: Settings) -> None:
    connection = valkey.Valkey(unix_socket_path=settings.celery_broker_url.removeprefix("redis+socket://"))
    connection.delete(queue_name(MODEL))
    assert post(client, parquet_bytes(prompts(9))).status_code == 201
    assert connection.llen(queue_name(MODEL)) == 3  # shards of 4 rows


def test_a_bad_row_does_not_refuse_the_file(client: TestClient) -> None:
    response = post(client, parquet_bytes(pa.table({"prompt": ["hello", None, ""]})))
    assert response.status_code == 201
    assert response.json()["counts"]["failed"] == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "no-such-model"}, "not configured"),
        ({"model": "../../etc/passwd"}, "not configured"),
        ({"prompt_column": "nope"}, "no column 'nope'"),
        ({"prompt_column": "prompt", "template": "{{ prompt }}"}, "not several"),
        ({"template": "{{ prompt"}, "does not parse"),
        ({"id_column": "\x00"}, "control characters"),
        ({"name": "a\x00b"}, "control characters"),
        ({"name": "a\x85b"}, "control characters"),
        ({"name": "x" * 201}, "200"),
        ({"decoding": "apar"}, "not known to fork"),
        ({"decoding": "beam"}, "use apar or ar"),
        ({"decoding": "apar+ptd"}, "does not have on vLLM: use apar or ar"),
        ({"max_tokens": "0"}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": ""}, "max_tokens"),
        ({"max_tokens": "9" * 5000}, "max_tokens"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "inf"}, "temperature"),
        ({"top_p": "1.5"}, "top_p"),
        ({"seed": str(1 << 63)}, "seed"),
        ({"n": "65"}, "the limit is 64"),
        ({"priority": "1001"}, "1000"),
        ({"priority": "9" * 30}, "1000"),
        ({"kv_share": "0"}, "above 0"),
        ({"kv_share": "1.5"}, "at most 1"),
        ({"kv_share": "nan"}, "kv_share is nan"),
        (
            {"prompt_column": "prompt", "template": "{{ prompt }}"},
            "give one of prompt_column, messages_column and template",
        ),
        ({"promt_column": "prompt"}, "promt_column"),
    ],
)
def test_a_refused_form_field_is_a_422_that_names_it(
    client: TestClient, settings: Settings, database: Database, fields: dict[str, str], text: str
) -> None:
    assert_problem(post(client, **fields), 422, text)
    assert left_behind(settings) == []
    with database.read() as connection:
        assert connection.execute(select(Job.id)).first() is None


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        (b"not parquet", "prompts.parquet", "prompts.parquet is not a readable Parquet file"),
        (parquet_bytes()[:-9], "prompts.parquet", "not a readable Parquet file"),
        (parquet_bytes(prompts(0)), "prompts.parquet", "0 rows"),
        (parquet_bytes(pa.table({"other": [1]})), "prompts.parquet", "neither"),
        (b"{}\n", "batch.jsonl", "batch.jsonl line 1"),
        (b"a,b\n", "prompts.csv", "'.csv'"),
        (parquet_bytes(), "noname", "suffix"),
        (parquet_bytes(), "../../.parquet", "suffix"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_422(
    client: TestClient, settings: Settings, content: bytes, name: str, text: str
) -> None:
    problem = assert_problem(post(client, content, name), 422, text)
    assert str(settings.home) not in problem["detail"]
    assert left_behind(settings) == []


@pytest.mark.parametrize("name", ["../../../x.parquet", "C:\\temp\\x.parquet", "ü" * 300 + ".parquet", "a\tb.parquet"])
def test_odd_file_names_stay_inside_the_scratch_folder(client: TestClient, settings: Settings, name: str) -> None:
    assert post(client, filename=name).status_code == 201
    assert left_behind(settings) == []


def test_an_upload_over_the_limit_is_a_413_before_and_after_it_is_read(client: TestClient, settings: Settings) -> None:
    limit = settings.limits.max_upload_bytes
    assert_problem(post(client, b"x" * (limit + 1)), 413, str(limit), "max_upload_bytes")
    declared = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Content-Length": str(100 << 20)}
    assert_problem(client.post("/v1/jobs", content=b"", headers=declared), 413)
    num_read = 0

    def endless() -> Any:
        nonlocal num_read
        yield file_part(b"")[:-2]
        while num_read < 64:
            num_read += 1
            yield b"x" * (1 << 18)

    assert_problem(post_raw(client, endless()), 413)
    assert left_behind(settings) == []


def test_a_file_of_exactly_the_limit_is_read(client: TestClient, settings: Settings) -> None:
    assert_problem(post(client, b"x" * settings.limits.max_upload_bytes), 422, "not a readable Parquet file")


def test_a_full_queue_is_a_429_that_says_when_to_come_again(settings: Settings) -> None:
    limits = settings.limits.model_copy(update={"max_queued_jobs": 1, "max_queued_rows": 4})
    app = create_app(settings.model_copy(update={"limits": limits}))
    with TestClient(app, base_url="http://localhost") as client:
        job = post(client).json()["job_id"]
        refused = post(client)
        assert_problem(refused, 429, "1 jobs of tenant default", "limits.max_queued_jobs is 1")
        assert int(refused.headers["retry-after"]) > 0
        assert left_behind(settings) == []
        client.post(f"/v1/jobs/{job}/cancel")
        assert_problem(post(client, parquet_bytes(prompts(5))), 422, "limits.max_queued_rows lets 4")
        assert post(client).status_code == 201


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "closing boundary"),
        (b"nonsense", 400, "not well-formed"),
        (file_part(parquet_bytes()), 400, "closing boundary"),
        (part(b'; filename="a.parquet"', b"x") + END, 400, "no name"),
        (part(b'; name="file"', b"x") + END, 422, "no file name"),
        (file_part(b"x") + file_part(b"x") + END, 422, "two files"),
        (part(b'; name="n"', b"1") * 2 + file_part(b"x") + END, 422, "twice"),
        (part(b'; name="name"', b"\xff") + file_part(b"x") + END, 422, "UTF-8"),
        (part(b'; name="name"', b"x") + END, 422, "no file"),
        (b"".join(part(b'; name="f%d"' % i, b"1") for i in range(99)) + END, 422, "parts"),
        (part(b'; name="template"', b"x" * (5 << 20)), 422, "bytes"),
    ],
)
def test_a_malformed_form_is_refused(
    client: TestClient, settings: Settings, body: bytes, status: int, text: str
) -> None:
    assert_problem(post_raw(client, iter([body])), status, text)
    assert left_behind(settings) == []


def test_another_content_type_is_a_415_and_a_missing_boundary_a_400(client: TestClient) -> None:
    assert_problem(client.post("/v1/jobs", json={"model": MODEL}), 415, "multipart/form-data")
    assert_problem(client.post("/v1/jobs"), 415)
    assert_problem(post_raw(client, b"x", None), 400, "boundary")


def test_the_file_may_come_before_the_fields_in_single_bytes(client: TestClient) -> None:
    body = file_part(parquet_bytes()) + part(b'; name="max_tokens"', b"5") + END
    assert post_raw(client, (body[i : i + 1] for i in range(len(body)))).status_code == 201
