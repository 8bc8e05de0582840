"""Models, probes, problems in general, who may ask, and the OpenAPI document."""

import logging
import os
import socket
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from api_support import UNKNOWN_JOB, assert_problem, parquet_bytes
from database_fixtures import BACKENDS
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError, ProgrammingError
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from api import scratch
from api.app import create_app
from api.results import JSONL, PARQUET, negotiate
from api.schemas import JobStatus
from db.upgrade import downgrade
from jobs import service
from jobs.settings import BUNDLED_APAR_MODEL, DEFAULT_MODEL, Settings

SECRET = "a prompt that nobody else may read"


def test_models_are_listed_without_where_they_come_from(client: TestClient) -> None:
    response = client.get("/v1/models")
    for model in response.json()["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
    assert_problem(client.get("/v1/models/gpt-9"), 404, "no model 'gpt-9': there are")
    body = response.json()
    assert body["object"] == "list"
    models = {model["id"]: model for model in body["data"]}
    assert models.keys() == {DEFAULT_MODEL, BUNDLED_APAR_MODEL, "secret"}
    assert models[DEFAULT_MODEL]["is_default"]
    assert models["secret"] | {"object": "model", "created": 0, "owned_by": "forq"} == models["secret"]
    assert models["secret"]["max_model_len"] == 64
    assert "hidden" not in response.text
    assert "HuggingFaceTB" not in response.text


def test_the_process_is_alive_whatever_else_is_not(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok", "version": version("forq")}


def test_ready_when_database_and_broker_are(client: TestClient) -> None:
    response = client.get("/readyz")
    assert response.status_code == 200, response.text
    assert {check["name"]: check["ok"] for check in response.json()["checks"]} == {"database": True, "broker": True}


@pytest.mark.parametrize("settings", BACKENDS, indirect=True)
def test_an_old_schema_is_named_by_readiness_and_a_503_elsewhere(client: TestClient, settings: Settings) -> None:
    downgrade(settings.sqlalchemy_url, "base")
    problem = assert_problem(client.get("/readyz"), 503, "forq db upgrade")
    assert [check["ok"] for check in problem["checks"]] == [False, True]
    response = client.get("/v1/jobs")
    assert_problem(response, 503, "database")
    assert response.headers["retry-after"]
    assert client.get("/healthz").status_code == 200


def test_a_missing_broker_is_named_by_readiness_but_refuses_no_job(settings: Settings, tmp_path: Path) -> None:
    without = settings.model_copy(update={"broker_url": f"redis+socket://{tmp_path}/none.sock"})
    with TestClient(create_app(without), base_url="http://localhost") as client:
        began = time.monotonic()
        problem = assert_problem(client.get("/readyz"), 503, "broker")
        assert time.monotonic() - began < 5
        assert [check["ok"] for check in problem["checks"]] == [True, False]
        assert str(tmp_path) not in problem["detail"]
        assert client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}).status_code == 201


def test_a_broker_that_never_answers_is_named_in_time_again_and_again(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://:hunter2@127.0.0.1:{silent.getsockname()[1]}/0"
        with TestClient(
            create_app(settings.model_copy(update={"broker_url": url})), base_url="http://localhost"
        ) as client:
            began = time.monotonic()
            for _ in range(3):
                problem = assert_problem(client.get("/readyz"), 503, "broker: no answer within 2 s")
                assert [check["ok"] for check in problem["checks"]] == [True, False]
            assert time.monotonic() - began < 9


def test_a_path_or_method_that_does_not_exist_is_a_problem(client: TestClient) -> None:
    assert_problem(client.get("/v2/jobs"), 404, "/v2/jobs")
    assert_problem(client.get("/v1/jobs/"), 404)
    assert_problem(client.get("/docs"), 404)
    response = client.delete(f"/v1/jobs/{UNKNOWN_JOB}")
    assert_problem(response, 405, "DELETE")
    assert "GET" in response.headers["allow"]


def test_an_unexpected_exception_is_a_500_whose_text_goes_nowhere(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(service, "list_jobs", broken)
    with caplog.at_level(logging.DEBUG), capture_logs() as events:
        response = client.get("/v1/jobs")
    assert_problem(response, 500)
    printed = capsys.readouterr()
    logged = printed.out + printed.err + caplog.text + repr(events)
    assert SECRET not in response.text + logged
    assert "request_crashed" in logged
    assert "RuntimeError" in logged


def test_a_database_that_is_gone_is_a_503_without_its_statement(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise OperationalError(f"SELECT {SECRET}", {"text": SECRET}, ConnectionError(SECRET))

    monkeypatch.setattr(service, "job_stats", gone)
    with capture_logs() as events:
        response = client.get(f"/v1/jobs/{UNKNOWN_JOB}/stats")
    assert_problem(response, 503)
    printed = capsys.readouterr()
    assert SECRET not in response.text + printed.out + printed.err + repr(events)
    assert events[0]["event"] == "database_unavailable"


def test_a_fault_in_our_own_sql_is_a_500(client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise ProgrammingError(f"SELCT {SECRET}", {}, ValueError(SECRET))

    monkeypatch.setattr(service, "job_stats", wrong)
    with capture_logs() as events:
        assert_problem(client.get(f"/v1/jobs/{UNKNOWN_JOB}/stats"), 500)
    printed = capsys.readouterr()
    assert events[0]["event"] == "request_crashed"
    assert SECRET not in printed.out + printed.err + repr(events)


def test_prompts_and_templates_are_not_logged(
    client: TestClient, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), capture_logs() as events:
        for template, status in ((SECRET + " {{ prompt }}", 201), (SECRET + " \x01", 422)):
            files = {"file": ("a.parquet", parquet_bytes())}
            response = client.post("/v1/jobs", files=files, data={"template": template})
            assert response.status_code == status
            assert SECRET not in response.text
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err + caplog.text + repr(events)
    assert "job_submitted" in repr(events)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        (None, "parquet"),
        ("*/*", "parquet"),
        ("application/*", "parquet"),
        (PARQUET, "parquet"),
        (JSONL, "jsonl"),
        ("application/jsonl", "jsonl"),
        (f"{JSONL}, */*;q=0.1", "jsonl"),
        (f"*/*, {PARQUET};q=0", "jsonl"),
        (f"{PARQUET};q=0.2, {JSONL};q=0.9", "jsonl"),
        (f"{PARQUET};q=x, {JSONL}", "jsonl"),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str | None, format: str) -> None:
    assert negotiate(accept) == format


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[::2]", "", "["])
def test_a_foreign_host_name_is_refused_on_loopback(client: TestClient, host: str) -> None:
    assert_problem(client.get("/v1/jobs", headers={"Host": host}), 403, "loopback")


@pytest.mark.parametrize("host", ["localhost", "localhost:8765", "127.0.0.1:1", "[::1]:8765", "127.9.9.9"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/v1/jobs", headers={"Host": host}).status_code == 200


def test_a_page_of_another_site_cannot_submit(client: TestClient) -> None:
    for origin, status in (("http://evil.example", 403), ("null", 403), ("http://localhost:3000", 201)):
        files = {"file": ("a.parquet", parquet_bytes())}
        assert client.post("/v1/jobs", files=files, headers={"Origin": origin}).status_code == status


def test_any_host_is_answered_where_the_operator_says_so(settings: Settings) -> None:
    with TestClient(create_app(settings, any_host=True), base_url="http://forq.example") as client:
        assert client.get("/healthz").status_code == 200


def test_old_leftovers_are_cleared_at_the_start_and_young_ones_kept(settings: Settings) -> None:
    folder = scratch.scratch_dir(settings)
    for name, age_s in (
        ("api-old", 2 * scratch.LEFT_BEHIND_S),
        ("api-young", 60),
        ("other", 2 * scratch.LEFT_BEHIND_S),
    ):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age_s,) * 2)
    scratch.prepare(settings)
    assert {path.name for path in folder.iterdir()} == {"api-young", "other"}


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{method} {path}", op) for path, item in document["paths"].items() for method, op in item.items()]


def test_every_operation_is_described_with_its_problems(client: TestClient, app: FastAPI) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["version"] == version("forq")
    assert len(operations(document)) >= 28
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(ids)) == len(ids)
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["tags"], name
        assert {"403", "500"} <= operation["responses"].keys(), name
        for status, response in operation["responses"].items():
            content = response.get("content", {})
            if int(status) >= 400:
                is_openai = operation["tags"] == ["batches"]
                assert content.keys() == {f"application/{'json' if is_openai else 'problem+json'}"}, (name, status)
            elif status != "304":
                assert content, (name, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_reference_in_the_document_leads_somewhere(client: TestClient) -> None:
    document = client.get("/openapi.json").json()

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return found.union(*(references(item) for item in value.values()))
        return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()

    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= schemas.keys()


def test_the_submit_form_is_in_the_document(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["required"] == ["file"]
    assert "Instead of the file" in schema["properties"]["url"]["description"]
    assert {"file", "url", "model", "prompt_column", "template", "max_tokens", "seed", "priority"} <= schema[
        "properties"
    ].keys()
    assert schema["additionalProperties"] is False


def test_the_example_of_a_status_is_one() -> None:
    for example in JobStatus.model_config["json_schema_extra"]["examples"]:  # type: ignore[index,call-overload,union-attr]
        JobStatus.model_validate(example)
