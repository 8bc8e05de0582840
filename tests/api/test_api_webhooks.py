"""Webhooks over REST: made, listed, tested and removed by their tenant, and by no other."""

from collections.abc import Iterator
from typing import Any

import pytest
from api_support import UNKNOWN_JOB, assert_problem, finish_shard, parquet_bytes
from starlette.testclient import TestClient

from api.app import create_app
from api.webhook_schemas import Delivery, Webhook
from db.session import Database
from jobs import keys
from jobs.settings import Settings
from jobs.webhook_settings import WebhookSettings
from jobs.webhooks import registry
from jobs.webhooks.deliveries import list_deliveries

URL = "https://hooks.example.com/forq"


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    webhooks = WebhookSettings.model_validate({"allow": ["https://hooks.example.com/"]})
    with TestClient(
        create_app(settings.model_copy(update={"webhooks": webhooks})), base_url="http://localhost"
    ) as client:
        yield client


def make(client: TestClient, **values: Any) -> dict[str, Any]:
    response = client.post("/v1/webhooks", json={"url": URL, **values})
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


def test_a_webhook_is_made_read_rotated_and_removed_and_its_secret_is_said_once(
    client: TestClient, database: Database
) -> None:
    made = make(client, events=["job.failed"])
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert (made["url"], made["events"], made["every_job"], made["tenant"]) == (URL, ["job.failed"], True, "default")
    path = f"/v1/webhooks/{made['id']}"
    assert client.get(path).json() == made
    assert client.get("/v1/webhooks").json() == {"webhooks": [made]}
    rotated = client.post(f"{path}/rotate", json={"overlap_s": 60}).json()
    assert rotated.pop("secret") not in (secret, None)
    assert rotated["old_secret_until"] is not None
    assert {**rotated, "old_secret_until": None} == made
    assert_problem(client.post(f"{path}/rotate", json={"overlap_s": 60}), 409, "two secrets already")
    assert client.delete(path).json() == rotated
    for response in (
        client.get(path),
        client.delete(path),
        client.post(f"{path}/test"),
        client.post(f"{path}/rotate", json={}),
        client.get(f"{path}/deliveries"),
    ):
        assert_problem(response, 404, "no webhook")
    assert client.get("/v1/webhooks").json() == {"webhooks": []}


def test_a_ping_and_a_jobs_events_are_queued_and_listed(client: TestClient, database: Database) -> None:
    path = f"/v1/webhooks/{make(client, every_job=False)['id']}"
    response = client.post(f"{path}/test")
    assert response.status_code == 202
    for fields in ({"webhook": URL}, {}):
        assert client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}, data=fields).status_code == 201
        finish_shard(database)
    found = client.get(f"{path}/deliveries").json()["deliveries"]
    assert [delivery["type"] for delivery in found] == ["job.completed", "job.running", "ping"]
    assert found[-1]["event_id"] == response.json()["event_id"]
    assert len(client.get(f"{path}/deliveries", params={"limit": 1}).json()["deliveries"]) == 1
    assert client.get(f"{path}/deliveries", params={"state": "failed"}).json() == {"deliveries": []}
    assert_problem(client.get(f"{path}/deliveries", params={"state": "lost"}), 422)
    response = client.post(
        "/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}, data={"webhook": "https://hooks.example.com/no"}
    )
    assert_problem(response, 422, "no webhook with this URL")


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"url": "https://evil.example/"}, 422, "webhooks.allow"),
        ({"url": "http://169.254.169.254/latest"}, 422, "webhooks.allow"),
        ({"url": URL + "\x00"}, 422, "plain characters"),
        ({"url": URL, "events": []}, 422, "events"),
        ({"url": URL, "events": ["job.queued"]}, 422, "events"),
        ({"url": URL, "every_job": "no"}, 422, "every_job"),
        ({"url": URL, "tenant": "other"}, 422, "tenant"),
        ({"url": URL, "secret": "whsec_mine"}, 422, "secret"),
        ({}, 422, "url"),
    ],
)
def test_what_cannot_be_a_webhook_is_refused(client: TestClient, body: Any, status: int, why: str) -> None:
    assert_problem(client.post("/v1/webhooks", json=body), status, why)
    assert client.get("/v1/webhooks").json() == {"webhooks": []}


def test_the_same_address_twice_is_a_conflict(client: TestClient) -> None:
    make(client)
    assert_problem(client.post("/v1/webhooks", json={"url": URL}), 409, "already")


def test_another_tenants_webhook_is_a_404_and_in_no_list(client: TestClient, database: Database) -> None:
    def headers(tenant: str, *scopes: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {keys.create(database, 'k', scopes, tenant=tenant)[1]}"}

    mine, theirs = (headers(tenant, "submit", "read") for tenant in ("a", "b"))
    made = client.post("/v1/webhooks", json={"url": URL}, headers=mine).json()
    assert made["tenant"] == "a"
    path = f"/v1/webhooks/{made['id']}"
    for method, where, body in (
        ("GET", path, None),
        ("DELETE", path, None),
        ("POST", f"{path}/rotate", {}),
        ("POST", f"{path}/test", None),
        ("GET", f"{path}/deliveries", None),
    ):
        response = client.request(method, where, json=body, headers=theirs)
        nobodys = client.request(method, where.replace(made["id"], UNKNOWN_JOB), json=body, headers=theirs)
        assert_problem(response, 404)
        assert response.text.replace(made["id"], "ID") == nobodys.text.replace(UNKNOWN_JOB, "ID")
    assert client.get("/v1/webhooks", headers=theirs).json() == {"webhooks": []}
    job = client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}, headers=theirs).json()
    finish_shard(database)
    assert list_deliveries(database, job_id=job["job_id"]) == []
    admin = headers("c", "admin")
    assert [webhook["id"] for webhook in client.get("/v1/webhooks", headers=admin).json()["webhooks"]] == [made["id"]]
    assert client.delete(path, headers=admin).status_code == 200
    reader = headers("a", "read")
    assert_problem(client.post("/v1/webhooks", json={"url": URL}, headers=reader), 403, "needs submit")


def test_the_models_have_every_key_of_what_is_described(client: TestClient, database: Database) -> None:
    webhook_id = make(client)["id"]
    registry.queue_ping(database, webhook_id)
    assert registry.get(database, webhook_id).keys() == Webhook.model_fields.keys()
    assert list_deliveries(database)[0].keys() == Delivery.model_fields.keys()


def test_a_body_has_a_limit_whether_it_says_its_length_or_not(client: TestClient) -> None:
    body = b'{"url": "' + b"x" * (1 << 20) + b'"}'
    for content in (body, iter([body[:1000], body[1000:]])):
        response = client.post("/v1/webhooks", content=content, headers={"Content-Type": "application/json"})
        assert_problem(response, 413, "the body is over 1048576 bytes: shorten it")
