"""Keys at the door: every route of the application without a key, with each kind of bad one, with another tenant's."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from api_support import UNKNOWN_JOB, assert_problem, finish_shard, parquet_bytes
from database_fixtures import BACKENDS
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import select, update
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from ulid import ULID

from api.app import create_app
from api.buckets import Buckets
from db.clock import db_now
from db.models import ApiKey, Job
from db.session import Database
from jobs import keys, service
from jobs.api_settings import ApiSettings
from jobs.settings import Settings

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)
OPEN = {"/healthz", "/readyz"}
BOTH = ("submit", "read")


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    """As on an address that others reach; the address of the tests may send bad keys without end."""
    api = ApiSettings(failures_per_minute=0)
    return create_app(settings.model_copy(update={"api": api}), keys_required=True, poll_s=0.05)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://forq.example") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def make(database: Database, *scopes: str, **options: Any) -> dict[str, str]:
    """A new key as the headers that show it."""
    return bearer(keys.create(database, "a test's", scopes or BOTH, **options)[1])


def submit(client: TestClient, headers: dict[str, str]) -> str:
    response = client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}, headers=headers)
    assert response.status_code == 201, response.text
    return str(response.json()["job_id"])


def requests_of(app: FastAPI, job_id: str = UNKNOWN_JOB) -> list[tuple[str, str, str]]:
    """Method, path, and the path's template, of every route there is: a new one cannot be forgotten."""
    found = []
    for route in app.routes:
        assert isinstance(route, APIRoute), f"{route} is no route that `authorize` stands before"
        values = defaultdict(lambda: UNKNOWN_JOB, job_id=job_id, row=0)  # of other things than jobs: none there is
        found += [(method, route.path.format_map(values), route.path) for method in sorted(route.methods or ())]
    assert len(found) >= 12
    return found


def guarded(app: FastAPI, job_id: str = UNKNOWN_JOB) -> list[tuple[str, str]]:
    return [(method, path) for method, path, template in requests_of(app, job_id) if template not in OPEN]


def of_a_job(app: FastAPI, job_id: str) -> list[tuple[str, str]]:
    found = [(method, path) for method, path, template in requests_of(app, job_id) if "{job_id}" in template]
    assert len(found) >= 6
    return found


def bad_credentials(database: Database) -> dict[str, str]:
    """The header's value, by what is wrong with it."""
    described, good = keys.create(database, "good", BOTH)
    revoked_id, revoked = (lambda made: (made[0]["id"], made[1]))(keys.create(database, "revoked", BOTH))
    keys.revoke(database, revoked_id)
    expired_id, expired = (lambda made: (made[0]["id"], made[1]))(keys.create(database, "old", BOTH, expires_s=3600))
    with database.write() as connection:
        connection.execute(update(ApiKey).where(ApiKey.id == expired_id).values(expires_at=db_now()))
    secret = good.rsplit(described["id"] + "_", 1)[1]
    other = "A" if secret[0] != "A" else "B"
    return {
        "empty": "",
        "no scheme": good,
        "another scheme": f"Basic {good}",
        "no key": "Bearer ",
        "not a key": "Bearer hunter2",
        "cut": f"Bearer {good[:-1]}",
        "longer": f"Bearer {good}A",
        "two": f"Bearer {good} {good}",
        "wrong secret": f"Bearer forq_{described['id']}_{other}{secret[1:]}",
        "wrong secret of that kind": f"Bearer forq_{described['id']}_{revoked[-43:]}",
        "unknown id": f"Bearer forq_{ULID()}_{secret}",
        "revoked": f"Bearer {revoked}",
        "expired": f"Bearer {expired}",
    }


def test_every_route_but_the_probes_asks_for_a_key(client: TestClient, app: FastAPI) -> None:
    for method, path in guarded(app):
        response = client.request(method, path)
        assert_problem(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in OPEN:
        assert client.get(path).status_code in (200, 503)  # a machine under load is not always ready


def test_a_body_that_cannot_be_read_is_not_looked_at_before_the_key(client: TestClient, app: FastAPI) -> None:
    for method, path in guarded(app):
        for kind in ("application/json", "multipart/form-data", "application/x-www-form-urlencoded"):
            for content in (b"{", b"\xff"):
                response = client.request(method, path, content=content, headers={"Content-Type": kind})
                assert_problem(response, 401, "API key")


def test_a_request_counts_once_however_its_body_is_read(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(Buckets, "take", lambda _, name, *rate: taken.append(name))
    headers = make(database, *BOTH)
    for path in ("/v1/webhooks", f"/v1/jobs/{UNKNOWN_JOB}/export", "/v1/batches"):
        assert client.post(path, json={}, headers=headers).status_code in (400, 404, 422)
    assert len(taken) == 3


def test_every_route_refuses_every_kind_of_bad_key(client: TestClient, app: FastAPI, database: Database) -> None:
    job_id = submit(client, make(database))
    for what, value in bad_credentials(database).items():
        for method, path in guarded(app, job_id):
            response = client.request(method, path, headers={"Authorization": value})
            problem = assert_problem(response, 401)
            assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"', (what, path)
            secret = value.split("_")[-1]
            assert len(secret) < 40 or secret not in str(problem), what
    assert service.job_status(database, job_id)["state"] == "queued"


def test_only_who_has_the_secret_learns_why_a_key_is_refused(client: TestClient, database: Database) -> None:
    bad = bad_credentials(database)
    texts = {what: client.get("/v1/jobs", headers={"Authorization": value}).json()["detail"] for what, value in
             bad.items()}  # fmt: skip
    assert texts["wrong secret"] == texts["unknown id"]
    assert "unknown" in texts["unknown id"]
    assert "revoked" in texts["revoked"]
    assert "expired" in texts["expired"]


def test_a_key_in_the_address_is_none(client: TestClient, database: Database) -> None:
    _, key = keys.create(database, "k", BOTH)
    for name in ("key", "api_key", "access_token", "token"):
        assert client.get("/v1/jobs", params={name: key}).status_code == 401
    assert client.get("/v1/jobs", headers=bearer(key)).status_code == 200
    assert client.get("/v1/jobs", headers={"Authorization": f"bearer {key}"}).status_code == 200  # RFC 9110: any case


def test_every_route_needs_its_scope(client: TestClient, app: FastAPI, database: Database) -> None:
    job_id = submit(client, make(database))
    headers = {scope: make(database, scope) for scope in ("submit", "read", "admin")}
    for method, path in guarded(app, job_id):
        needed = "read" if method == "GET" else "submit"
        lacking = "submit" if method == "GET" else "read"
        for target in {path, path.replace(job_id, UNKNOWN_JOB)}:
            response = client.request(method, target, headers=headers[lacking])
            assert_problem(response, 403, lacking, f"needs {needed}")
            assert f'scope="{needed}"' in response.headers["www-authenticate"]
    for method, path in guarded(app, job_id):
        of_others = UNKNOWN_JOB in path
        for scope in ("read" if method == "GET" else "submit", "admin"):
            status = client.request(method, path, headers=headers[scope]).status_code
            assert status in ((400, 404, 415, 422) if of_others else (200, 400, 409, 415, 422)), (scope, path)


def test_another_tenants_job_is_a_404_on_every_route_and_stays_as_it_is(
    client: TestClient, app: FastAPI, database: Database
) -> None:
    mine, others = make(database, tenant="a"), make(database, tenant="b")
    job_id = submit(client, mine)
    finish_shard(database, failing=(1,))  # now a retry would do something
    before = service.job_status(database, job_id)
    for method, path in of_a_job(app, job_id):
        theirs = client.request(method, path, headers=others)
        nobodys = client.request(method, path.replace(job_id, UNKNOWN_JOB), headers=others)
        assert_problem(theirs, 404, job_id)
        assert theirs.text.replace(job_id, "JOB") == nobodys.text.replace(UNKNOWN_JOB, "JOB")
        assert dict(theirs.headers) == dict(nobodys.headers)
        assert client.request(method, path.lower() if "/v1" in path else path, headers=others).status_code == 404
    # What is wrong with the question says nothing of the job either.
    for path in ("?wait=nonsense", "?wait=60", "/requests/-1", "/requests/99", "/results?format=x"):
        theirs = client.get(f"/v1/jobs/{job_id}{path}", headers=others)
        nobodys = client.get(f"/v1/jobs/{UNKNOWN_JOB}{path}", headers=others)
        assert theirs.status_code == nobodys.status_code == 404, path
    assert service.job_status(database, job_id) == before
    assert client.get(f"/v1/jobs/{job_id}", headers=mine).json() == before


def test_lists_show_a_tenant_its_own_jobs_and_an_admin_all(client: TestClient, database: Database) -> None:
    a, b, admin = make(database, tenant="a"), make(database, tenant="b"), make(database, "admin", tenant="c")
    ids = [submit(client, headers) for headers in (a, b, a, b, a)]

    def listed(headers: dict[str, str], **params: Any) -> list[str]:
        return [job["job_id"] for job in client.get("/v1/jobs", params=params, headers=headers).json()["jobs"]]

    assert listed(a) == [ids[4], ids[2], ids[0]]
    assert listed(b) == [ids[3], ids[1]]
    assert listed(admin) == ids[::-1]
    assert listed(make(database, tenant="d")) == []
    assert listed(a, state="queued", before=ids[4]) == [ids[2], ids[0]]
    assert listed(b, before=ids[4], limit=1) == [ids[3]]
    assert listed(b, state="completed") == []
    page = client.get("/v1/jobs", params={"limit": 2}, headers=b).json()
    assert [job["job_id"] for job in page["jobs"]] == [ids[3], ids[1]]
    assert listed(b, before=page["next_before"]) == []
    assert submit(client, admin) in listed(make(database, tenant="c"))


def test_the_key_alone_says_whose_a_job_is(client: TestClient, database: Database) -> None:
    headers = make(database, tenant="a")
    files = {"file": ("a.parquet", parquet_bytes())}
    assert_problem(client.post("/v1/jobs", files=files, data={"tenant": "b"}, headers=headers), 422, "tenant")
    job_id = submit(client, headers)
    with database.read() as connection:
        assert connection.execute(select(Job.tenant).where(Job.id == job_id)).scalar_one() == "a"


def test_a_key_ends_with_the_next_request_after_its_revocation(client: TestClient, database: Database) -> None:
    described, key = keys.create(database, "k", BOTH)
    assert client.get("/v1/jobs", headers=bearer(key)).status_code == 200
    keys.revoke(database, described["id"])
    assert_problem(client.get("/v1/jobs", headers=bearer(key)), 401, "revoked")


def test_a_key_is_nowhere_in_logs_and_its_secret_nowhere_in_the_database(
    client: TestClient, app: FastAPI, database: Database, settings: Settings, capsys: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.DEBUG), capture_logs() as events:
        made = [keys.create(database, "k", BOTH)[1], *(v.split()[-1] for v in bad_credentials(database).values() if v)]
        for key in made:
            for method, path in guarded(app):
                client.request(method, path, headers=bearer(key))
        submit(client, bearer(made[0]))
    printed = capsys.readouterr()
    secrets = [key[-43:] for key in made if len(key) > 60]
    logged = printed.out + printed.err + caplog.text + repr(events)
    assert len(secrets) >= 5
    assert "key_refused" in logged
    assert [secret for secret in secrets if secret in logged] == []
    with database.read() as connection:
        rows = repr(connection.execute(select(ApiKey.__table__)).all())
    stored = rows + "".join(
        path.read_bytes().decode("latin-1") for path in settings.home.rglob("forq*.db*") if path.is_file()
    )
    assert [secret for secret in secrets if secret in stored] == []
    assert all(made[0] not in repr(value) for value in (keys.parse(made[0]), app.state.access))


def test_the_last_use_is_written_once_a_minute_and_not_per_request(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []
    note_use = keys.note_use

    def counted(database: Database, key_id: str) -> bool:
        written.append(note_use(database, key_id))
        return written[-1]

    monkeypatch.setattr(keys, "note_use", counted)
    described, key = keys.create(database, "k", BOTH)
    assert described["last_used_at"] is None

    def last_used() -> str | None:
        return next(found["last_used_at"] for found in keys.list_keys(database) if found["id"] == described["id"])

    def until_used(before: str | None) -> str | None:
        deadline = time.monotonic() + 20
        while last_used() == before:
            assert time.monotonic() < deadline
            assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        return last_used()

    first = until_used(None)
    for _ in range(20):
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
    assert (written.count(True), last_used()) == (1, first)
    with database.write() as connection:
        connection.execute(update(ApiKey).values(last_used_at=db_now(-61.0)))
    until_used(last_used())
    assert written.count(True) == 2


def test_the_document_says_what_to_send(client: TestClient, database: Database) -> None:
    document = client.get("/openapi.json", headers=make(database, "read")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, item in document["paths"].items():
        for operation in item.values():
            if path in OPEN:
                assert "security" not in operation
            else:
                assert operation["security"] == [{"key": []}]
                assert {"401", "403", "429"} <= operation["responses"].keys(), path
