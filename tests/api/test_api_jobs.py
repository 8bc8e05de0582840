"""Listing, status, cancel, retry, one row, statistics: each with its success and its refusals."""

from typing import Any

import pytest
from api_support import MODEL, UNKNOWN_JOB, Submit, assert_problem, finish_shard, parquet_bytes, prompts
from database_fixtures import BACKENDS
from starlette.testclient import TestClient

from db.session import Database
from jobs import leases, service

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)
ROUTES = [
    ("GET", "/v1/jobs/{}"),
    ("POST", "/v1/jobs/{}/cancel"),
    ("POST", "/v1/jobs/{}/retry"),
    ("GET", "/v1/jobs/{}/results"),
    ("GET", "/v1/jobs/{}/requests/0"),
    ("GET", "/v1/jobs/{}/stats"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "job_id", [UNKNOWN_JOB, "x", "8ZZZZZZZZZZZZZZZZZZZZZZZZZ", "%00", "é" * 26, "I" * 26, "a" * 3000]
)
def test_an_unknown_or_impossible_job_is_a_404(client: TestClient, method: str, path: str, job_id: str) -> None:
    assert_problem(client.request(method, path.format(job_id)), 404, "no")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_job_ids_may_be_in_lower_case(client: TestClient, submit: Submit, method: str, path: str) -> None:
    job_id = submit()["job_id"]
    assert client.request(method, path.format(job_id.lower())).status_code in (200, 409)


def test_every_answer_is_what_the_service_says(client: TestClient, submit: Submit, database: Database) -> None:
    job_id = submit(prompts(4), id_column="key")["job_id"]
    finish_shard(database, failing=(1,))
    assert client.get(f"/v1/jobs/{job_id}").json() == service.job_status(database, job_id)
    assert client.get("/v1/jobs").json()["jobs"] == service.list_jobs(database)
    assert client.get(f"/v1/jobs/{job_id}/stats").json() == service.job_stats(database, job_id)
    for row in (0, 1):
        expected = service.request_detail(database, job_id, row)
        assert client.get(f"/v1/jobs/{job_id}/requests/{row}").json() == expected


def test_a_row_shows_its_answer_its_tree_and_its_statistics(
    client: TestClient, submit: Submit, database: Database
) -> None:
    job_id = submit(id_column="key")["job_id"]
    finish_shard(database, failing=(2,))
    row = client.get(f"/v1/jobs/{job_id}/requests/1").json()
    assert (row["row"], row["id"], row["state"]) == (1, "1", "completed")
    assert row["samples"][0]["output"] == "an answer"
    assert row["samples"][0]["stats"]["peak_cached_tokens"] == 8
    assert [node["kind"] for node in row["samples"][0]["tree"]] == ["root"]
    failed = client.get(f"/v1/jobs/{job_id}/requests/2").json()
    assert (failed["state"], failed["error_code"], failed["samples"]) == ("failed", "engine_error", [])


@pytest.mark.parametrize(
    ("row", "status"),
    [("3", 404), (str((1 << 63) - 1), 404), (str(1 << 63), 422), ("-1", 422), ("x", 422), ("%00", 422)],
)
def test_a_row_that_is_not_there_is_never_a_500(client: TestClient, submit: Submit, row: str, status: int) -> None:
    assert_problem(client.get(f"/v1/jobs/{submit()['job_id']}/requests/{row}"), status)


def test_jobs_are_listed_newest_first_page_by_page(client: TestClient, submit: Submit) -> None:
    ids = [submit()["job_id"] for _ in range(3)]
    first = client.get("/v1/jobs", params={"limit": 2}).json()
    assert [job["job_id"] for job in first["jobs"]] == sorted(ids, reverse=True)[:2]
    rest = client.get("/v1/jobs", params={"limit": 2, "before": first["next_before"].lower()}).json()
    assert [job["job_id"] for job in rest["jobs"]] == sorted(ids)[:1]
    assert rest["next_before"] is None


def test_jobs_are_listed_by_state(client: TestClient, submit: Submit, database: Database) -> None:
    done, waiting = submit()["job_id"], submit()["job_id"]
    finish_shard(database)
    for state, job_id in (("completed", done), ("queued", waiting)):
        assert [job["job_id"] for job in client.get("/v1/jobs", params={"state": state}).json()["jobs"]] == [job_id]


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"limit": 0}, "query.limit"),
        ({"limit": 1001}, "query.limit"),
        ({"limit": "x"}, "query.limit"),
        ({"state": "nope"}, "query.state"),
        ({"before": "nope"}, "query.before"),
        ({"before": "\x00"}, "query.before"),
        ({"satte": "queued"}, "query.satte"),
    ],
)
def test_a_refused_list_parameter_is_named(client: TestClient, params: dict[str, Any], where: str) -> None:
    problem = assert_problem(client.get("/v1/jobs", params=params), 422, where)
    assert problem["errors"][0]["where"] == where


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "inf", "x"])
def test_a_wait_out_of_range_is_refused(client: TestClient, submit: Submit, wait: str) -> None:
    assert_problem(client.get(f"/v1/jobs/{submit()['job_id']}", params={"wait": wait}), 422, "query.wait")


def test_a_status_that_is_known_is_a_304_until_it_changes(
    client: TestClient, submit: Submit, database: Database
) -> None:
    path = f"/v1/jobs/{submit()['job_id']}"
    etag = client.get(path).headers["etag"]
    assert etag.startswith('"')
    for known in (etag, f'"other", W/{etag}', "*"):
        response = client.get(path, headers={"If-None-Match": known})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    finish_shard(database)
    response = client.get(path, headers={"If-None-Match": etag})
    assert response.status_code == 200
    assert response.json()["state"] == "completed"
    assert response.headers["etag"] != etag


def test_the_eta_alone_is_no_news(client: TestClient, submit: Submit, database: Database) -> None:
    path = f"/v1/jobs/{submit(prompts(8))['job_id']}"
    finish_shard(database)
    first = client.get(path)
    etas = {first.json()["eta_s"]}
    while len(etas) == 1:  # it is computed from the database's clock
        etas.add(client.get(path).json()["eta_s"])
    assert client.get(path, headers={"If-None-Match": first.headers["etag"]}).status_code == 304


def test_cancelling_a_waiting_job_ends_it_at_once(client: TestClient, submit: Submit) -> None:
    job_id = submit()["job_id"]
    response = client.post(f"/v1/jobs/{job_id}/cancel")
    assert response.status_code == 200
    assert response.json()["state"] == "cancelled"
    assert response.json()["counts"]["cancelled"] == 3
    assert_problem(client.post(f"/v1/jobs/{job_id}/cancel"), 409, "cancelled already")


def test_cancelling_a_running_job_is_accepted_and_done_later(
    client: TestClient, submit: Submit, database: Database
) -> None:
    job_id = submit()["job_id"]
    lease = leases.acquire(database, MODEL, "OWNER", 60.0)
    assert lease is not None
    response = client.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["state"]) == (202, "cancelling")
    leases.abandon(database, lease)
    assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"


def test_retry_asks_failed_rows_again_and_nothing_else(client: TestClient, submit: Submit, database: Database) -> None:
    job_id = submit()["job_id"]
    assert_problem(client.post(f"/v1/jobs/{job_id}/retry"), 409, "queued")
    finish_shard(database, failing=(0, 2))
    response = client.post(f"/v1/jobs/{job_id}/retry")
    assert response.status_code == 200
    assert (response.json()["retried"], response.json()["state"]) == (2, "queued")
    finish_shard(database)
    assert client.get(f"/v1/jobs/{job_id}").json()["counts"]["completed"] == 3
    assert_problem(client.post(f"/v1/jobs/{job_id}/retry"), 409, "no failed row")


def test_an_upload_needs_no_column_name_when_the_file_has_a_prompt_column(client: TestClient) -> None:
    assert client.post("/v1/jobs", files={"file": ("a.pq", parquet_bytes())}).status_code == 201
