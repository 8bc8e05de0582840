"""Submits and exports by URL over the API, against a real server that speaks S3."""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest
from api_support import UNKNOWN_JOB, assert_problem, finish_shard, parquet_bytes, prompts
from fastapi import FastAPI
from s3_server import BUCKET, S3Server, set_credentials, storage_at
from starlette.testclient import TestClient

from api.app import create_app
from db.session import Database
from jobs import keys
from jobs.settings import Settings
from jobs.storage_settings import StorageRoot


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("moto") / "log")
    yield server
    server.close()


@pytest.fixture
def app(settings: Settings, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    set_credentials(monkeypatch)
    storage = storage_at(s3.url)
    red = StorageRoot(url=f"s3://{BUCKET}/red/", tenants=("red",), endpoint_override=s3.url)
    storage = storage.model_copy(update={"roots": (*storage.roots, red)})
    return create_app(settings.model_copy(update={"storage": storage}), poll_s=0.05)


def post_url(client: TestClient, url: str, **fields: str) -> Any:
    form = {"url": url, **fields}
    return client.post("/v1/jobs", files={name: (None, value) for name, value in form.items()})


def test_a_job_is_made_of_a_url_and_exported_to_one(client: TestClient, database: Database, s3: S3Server) -> None:
    response = post_url(client, s3.put("in/prompts.parquet", parquet_bytes()), name="from afar")
    assert response.status_code == 201, response.text
    job_id = response.json()["job_id"]
    assert response.json()["name"] == "from afar"
    finish_shard(database, failing=(1,))
    url = f"s3://{BUCKET}/out/answers.parquet"
    response = client.post(f"/v1/jobs/{job_id}/export", json={"url": url})
    assert response.status_code == 200, response.text
    assert response.json() == {"job_id": job_id, "url": url, "format": "parquet", "rows": 3}
    table = pq.read_table(io.BytesIO(s3.get("out/answers.parquet")))
    assert table.select(["prompt", "key"]).equals(prompts())
    assert table["forq_output"].to_pylist() == ["an answer", None, "an answer"]


def test_an_export_takes_the_options_of_a_download(client: TestClient, database: Database, s3: S3Server) -> None:
    job_id = post_url(client, s3.put("in/prompts.parquet", parquet_bytes())).json()["job_id"]
    finish_shard(database, failing=(1,))
    body = {"url": f"s3://{BUCKET}/out/failed.json", "format": "jsonl", "failed": True, "with_trees": True}
    assert client.post(f"/v1/jobs/{job_id}/export", json=body).json()["rows"] == 1
    assert s3.get("out/failed.json").count(b"\n") == 1
    assert b'"forq_tree"' in s3.get("out/failed.json")


def test_a_form_has_a_file_or_a_url(client: TestClient, s3: S3Server) -> None:
    files = {"file": ("a.parquet", parquet_bytes()), "url": (None, f"s3://{BUCKET}/in/a.parquet")}
    assert_problem(client.post("/v1/jobs", files=files), 422, "a file and a url")
    assert_problem(client.post("/v1/jobs", files={"name": (None, "x")}), 422, "no file", "url")


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        (f"s3://{BUCKET}/in/none.parquet", 422, "no such object"),
        (f"s3://{BUCKET}/elsewhere/a.parquet", 422, "under none of the roots"),
        (f"s3://{BUCKET}/in/../elsewhere/a.parquet", 422, "'..' part"),
        ("file:///etc/passwd", 422, "under none of the roots"),
        ("http://127.0.0.1/a.parquet", 422, "use s3://"),
        ("no-url", 422, "use s3://"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused(
    client: TestClient, settings: Settings, url: str, status: int, says: str
) -> None:
    assert_problem(post_url(client, url), status, says)
    assert list((settings.home / "tmp").iterdir()) == []
    assert client.get("/v1/jobs").json()["jobs"] == []


def test_a_bad_option_is_found_before_anything_is_fetched(client: TestClient) -> None:
    url = f"s3://{BUCKET}/in/none.parquet"
    assert_problem(post_url(client, url, model="nobody"), 422, "not configured")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"s3://{BUCKET}/in/a.parquet", "read only"),
        (f"s3://{BUCKET}/a.parquet", "under none of the roots"),
        (f"s3://{BUCKET}/out/a.txt", "suffix"),
        (f"s3://{BUCKET}/out/", "names a folder"),
        ("s3://no-such-bucket/a.parquet", "no bucket"),
    ],
)
def test_an_export_that_cannot_be_written_is_refused(
    client: TestClient, s3: S3Server, settings: Settings, url: str, says: str
) -> None:
    job_id = post_url(client, s3.put("in/prompts.parquet", parquet_bytes())).json()["job_id"]
    assert_problem(client.post(f"/v1/jobs/{job_id}/export", json={"url": url}), 422, says)
    assert list((settings.home / "tmp").iterdir()) == []


def test_an_export_names_a_job_and_nothing_unknown(client: TestClient) -> None:
    url = f"s3://{BUCKET}/out/a.parquet"
    assert_problem(client.post(f"/v1/jobs/{UNKNOWN_JOB}/export", json={"url": url}), 404)
    job_id = UNKNOWN_JOB
    assert_problem(client.post(f"/v1/jobs/{job_id}/export", json={"url": url, "path": "/x"}), 422, "path")


def test_a_root_of_one_tenant_is_closed_to_the_others(client: TestClient, database: Database, s3: S3Server) -> None:
    url = s3.put("red/prompts.parquet", parquet_bytes())
    tokens = {tenant: keys.create(database, tenant, ["submit", "read"], tenant=tenant)[1] for tenant in ("red", "blue")}

    def ask(tenant: str, path: str, **values: Any) -> Any:
        return client.post(path, headers={"Authorization": f"Bearer {tokens[tenant]}"}, **values)

    form = {"url": (None, url)}
    assert_problem(ask("blue", "/v1/jobs", files=form), 422, "under none of the roots")
    assert ask("red", "/v1/jobs", files=form).status_code == 201
    mine = ask("blue", "/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}).json()["job_id"]
    body = {"url": f"s3://{BUCKET}/red/stolen.parquet"}
    assert_problem(ask("blue", f"/v1/jobs/{mine}/export", json=body), 422, "under none of the roots")
    assert "red/stolen.parquet" not in s3.list_keys()


def test_a_server_without_roots_opens_no_url(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        assert_problem(post_url(client, "file:///etc/passwd"), 422, "storage.roots is empty")
