"""The routes of batches: what is refused at once, lists, cancelling, whose they are."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from api_support import assert_openai_error, finish_shard
from openai_support import CHAT, many
from server_process import until
from sqlalchemy import update
from starlette.testclient import TestClient

from api.app import create_app
from db.models import Batch, Job
from db.session import Database
from jobs import keys
from jobs.settings import Settings
from jobs.upkeep.checks import CHECKS
from jobs.upkeep.purge import purge

UNKNOWN = "batch_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"


def upload(client: TestClient, content: bytes | None = None, **options: Any) -> str:
    files = {"file": ("a.jsonl", many(6) if content is None else content)}
    response = client.post("/v1/files", files=files, data={"purpose": "batch"}, **options)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def body(file_id: str, **values: Any) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **values}


def create(client: TestClient, file_id: str | None = None, headers: Any = None, **values: Any) -> dict[str, Any]:
    file_id = file_id or upload(client, headers=headers)
    response = client.post("/v1/batches", json=body(file_id, **values), headers=headers)
    assert response.status_code == 200, response.text
    created: dict[str, Any] = response.json()
    return created


def status(client: TestClient, batch_id: str, headers: Any = None) -> str:
    return str(client.get(f"/v1/batches/{batch_id}", headers=headers).json()["status"])


def until_is(client: TestClient, batch_id: str, state: str, headers: Any = None) -> None:
    until(lambda: status(client, batch_id, headers) == state)


def test_a_creation_is_answered_before_the_file_is_looked_at(client: TestClient) -> None:
    batch = create(client, upload(client, b"no JSON"), metadata={"a": "b"})
    assert batch["status"] == "validating"
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    assert batch["metadata"] == {"a": "b"}
    until_is(client, batch["id"], "failed")
    errors = client.get(f"/v1/batches/{batch['id']}").json()["errors"]
    assert errors["object"] == "list"
    assert [(each["code"], each["line"]) for each in errors["data"]] == [("invalid_json_line", 1)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1 day"}, "30m, 24h or 7d"),
        ({"completion_window": "0h"}, "30m, 24h or 7d"),
        ({"completion_window": "31d"}, "up to 30d"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "17 keys"),
        ({"metadata": {"k" * 65: ""}}, "64 characters"),
        ({"metadata": {"k": "\x00"}}, "control characters"),
        ({"metadata": {"k": "\ud800"}}, "surrogate"),
        ({"metadata": {"\x00": ""}}, "control characters"),
        ({"metadata": {"\ud800": ""}}, "surrogate"),
        ({"template": "x" * ((1 << 20) + 1)}, "1048577 characters, the limit is 1048576"),
        ({"prompt_column": "x" * ((1 << 20) + 1)}, "prompt_column has 1048577"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "between 3600"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "anchor"),
        ({"model": "gpt-9"}, "known aliases"),
        ({"model": "smollm2-135m", "decoding": "warp"}, "decoding"),
        ({"priority": 5000}, "priority"),
        ({"kv_share": 2}, "kv_share"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"colour": "red"}, "colour"),
        ({"input_file_id": "x"}, "file-"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_refused_value_is_a_400_that_names_it(client: TestClient, values: dict[str, Any], text: str) -> None:
    content = json.dumps({**body(upload(client)), **values})  # httpx would refuse half of a surrogate pair
    response = client.post("/v1/batches", content=content, headers={"Content-Type": "application/json"})
    assert text in str(assert_openai_error(response, 400))
    assert client.get("/v1/batches").json()["data"] == []


def test_malformed_bodies_are_refused_in_openais_form(client: TestClient) -> None:
    for content in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        assert_openai_error(client.post("/v1/batches", content=content), 400)
    assert_openai_error(client.post("/v1/batches", content=b" " * ((8 << 20) + 1)), 413)
    assert_openai_error(client.post("/v1/batches", json=body("file-01JZ8Y3M5N7Q9R1S2T4V6W8X0Z")), 404)


def test_a_retried_creation_is_the_same_batch(client: TestClient) -> None:
    file_id = upload(client)
    first = create(client, file_id)["id"]
    assert create(client, file_id)["id"] == first
    assert create(client, file_id, metadata={"again": "1"})["id"] != first


def test_the_output_of_a_batch_makes_no_batch(client: TestClient, database: Database) -> None:
    batch_id = create(client)["id"]
    until_is(client, batch_id, "in_progress")
    finish_shard(database)
    finish_shard(database)
    until_is(client, batch_id, "completed")
    output = client.get(f"/v1/batches/{batch_id}").json()["output_file_id"]
    assert_openai_error(client.post("/v1/batches", json=body(output)), 400, "batch_output")
    kinds = {each["purpose"] for each in client.get("/v1/files").json()["data"]}
    assert kinds == {"batch", "batch_output"}


def test_output_expires_as_the_batch_says(client: TestClient, database: Database) -> None:
    batch_id = create(client, output_expires_after={"anchor": "created_at", "seconds": 7200})["id"]
    until_is(client, batch_id, "in_progress")
    finish_shard(database)
    finish_shard(database)
    until_is(client, batch_id, "completed")
    file = client.get(f"/v1/files/{client.get(f'/v1/batches/{batch_id}').json()['output_file_id']}").json()
    assert file["expires_at"] == file["created_at"] + 7200


def test_lists_page_newest_first(client: TestClient) -> None:
    file_id = upload(client)
    ids = [create(client, file_id, metadata={"i": str(i)})["id"] for i in range(5)]
    first = client.get("/v1/batches", params={"limit": 3}).json()
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:1:-1], True)
    rest = client.get("/v1/batches", params={"limit": 3, "after": first["last_id"]}).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[1::-1], False)
    for query in ({"limit": 0}, {"limit": 101}, {"after": "x"}, {"state": "failed"}):
        assert_openai_error(client.get("/v1/batches", params=query), 400)


def test_cancelling_what_has_ended_is_a_400(client: TestClient) -> None:
    batch_id = create(client)["id"]
    until_is(client, batch_id, "in_progress")
    assert client.post(f"/v1/batches/{batch_id}/cancel").json()["status"] in ("cancelling", "cancelled")
    until_is(client, batch_id, "cancelled")
    assert_openai_error(client.post(f"/v1/batches/{batch_id}/cancel"), 400, "is cancelled")


def test_an_unknown_batch_is_a_404_on_every_route(client: TestClient) -> None:
    for batch_id in (UNKNOWN, "x", "batch_%00", "a" * 300):
        assert_openai_error(client.get(f"/v1/batches/{batch_id}"), 404)
        assert_openai_error(client.post(f"/v1/batches/{batch_id}/cancel"), 404)


def test_batches_go_with_their_jobs_when_those_are_purged(
    client: TestClient, database: Database, settings: Settings
) -> None:
    batch_id = create(client)["id"]
    until_is(client, batch_id, "in_progress")
    assert purge(database, settings, 0.0).batches == 0
    finish_shard(database)
    finish_shard(database)
    until_is(client, batch_id, "completed")
    output = client.get(f"/v1/batches/{batch_id}").json()["output_file_id"]
    assert purge(database, settings, 0.0, dry_run=True).batches == 1
    done = purge(database, settings, 0.0)
    assert (done.batches, done.jobs) == (1, 1)
    assert_openai_error(client.get(f"/v1/batches/{batch_id}"), 404)
    assert_openai_error(client.get(f"/v1/files/{output}"), 404)
    assert len(client.get("/v1/files").json()["data"]) == 1  # the upload is its owner's


def test_the_doctor_finds_batches_that_nobody_takes_on(database: Database, settings: Settings) -> None:
    with TestClient(create_app(settings, poll_s=0.05), base_url="http://localhost") as client:
        batch_id = create(client)["id"]
        until_is(client, batch_id, "in_progress")
        (check,) = [check for check in CHECKS if check.name == "batches go on"]
        assert check.find(database, settings).num == 0
    # The API is away when the job ends.
    finish_shard(database)
    finish_shard(database)
    assert check.find(database, settings).num == 0
    with database.write() as connection:
        connection.execute(update(Job).values(finished_at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert check.find(database, settings).example == batch_id


@pytest.fixture
def guarded(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings, keys_required=True, poll_s=0.05), base_url="http://forq.example") as client:
        yield client


def test_batches_are_their_tenants_alone(guarded: TestClient, database: Database) -> None:
    def bearer(tenant: str, *scopes: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {keys.create(database, 'k', scopes, tenant=tenant)[1]}"}

    mine, others = bearer("a", "submit", "read"), bearer("b", "submit", "read")
    file_id = upload(guarded, headers=mine)
    assert_openai_error(guarded.post("/v1/batches", json=body(file_id), headers=others), 404, file_id)
    batch_id = create(guarded, file_id, headers=mine)["id"]
    for method, path in (("GET", ""), ("POST", "/cancel")):
        theirs = guarded.request(method, f"/v1/batches/{batch_id}{path}", headers=others)
        assert_openai_error(theirs, 404, batch_id)
    assert guarded.get("/v1/batches", headers=others).json()["data"] == []
    assert [each["id"] for each in guarded.get("/v1/batches", headers=mine).json()["data"]] == [batch_id]
    until_is(guarded, batch_id, "in_progress", mine)
    with database.read() as connection:
        job = connection.execute(Job.__table__.select()).one()
        assert (job.tenant, job.name) == ("a", batch_id)
        assert connection.execute(Batch.__table__.select()).one().job_id == job.id
    assert guarded.get(f"/v1/jobs/{job.id}", headers=others).status_code == 404
