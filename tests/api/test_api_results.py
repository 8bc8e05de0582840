"""GET /v1/jobs/{id}/results: both formats, input columns untouched, nothing left on disk."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_support import Submit, assert_problem, finish_shard, parquet_bytes, prompts
from database_fixtures import BACKENDS
from starlette.testclient import TestClient

from db.session import Database
from jobs.settings import Settings

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)
PARQUET, JSONL = "application/vnd.apache.parquet", "application/x-ndjson"


def table_of(content: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(content))


def exact(table: pa.Table) -> bytes:
    """Schema, metadata and values, as bytes: equality of tables would take -0.0 for 0.0."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue()


def left_behind(settings: Settings) -> list[Path]:
    return list((settings.home / "tmp").iterdir())


def odd_table() -> pa.Table:
    return pa.table(
        {
            "prompt": ["plain", "ünïcode 😀", None, " spaces "],
            "score": pa.array([1.5, None, float("nan"), -0.0], pa.float32()),
            "tags": pa.array([["a"], [], None, ["b", "c"]], pa.list_(pa.string())),
            "when": pa.array([0, 1, None, 3], pa.timestamp("us", tz="UTC")),
        }
    ).replace_schema_metadata({"origin": "test"})


def test_parquet_results_keep_the_input_columns_as_they_were(
    client: TestClient, submit: Submit, database: Database, settings: Settings
) -> None:
    table = odd_table()
    job_id = submit(table)["job_id"]
    finish_shard(database)
    response = client.get(f"/v1/jobs/{job_id}/results")
    assert response.status_code == 200
    assert response.headers["content-type"] == PARQUET
    assert response.headers["content-disposition"] == f'attachment; filename="forq-{job_id}.parquet"'
    assert int(response.headers["content-length"]) == len(response.content)
    exported = table_of(response.content)
    uploaded = table_of(parquet_bytes(table))
    assert exact(exported.select(table.column_names)) == exact(uploaded)
    assert exported["forq_output"].to_pylist() == ["an answer", "an answer", None, "an answer"]
    assert exported["forq_error_code"].to_pylist() == [None, None, "empty_prompt", None]
    assert "forq_tree" not in exported.column_names
    assert left_behind(settings) == []


def test_jsonl_results_have_one_object_a_row(
    client: TestClient, submit: Submit, database: Database, settings: Settings
) -> None:
    job_id = submit()["job_id"]
    finish_shard(database)
    response = client.get(f"/v1/jobs/{job_id}/results", params={"format": "jsonl"})
    assert response.headers["content-type"] == JSONL
    assert f"forq-{job_id}.jsonl" in response.headers["content-disposition"]
    rows = [json.loads(line) for line in response.text.splitlines()]
    assert [{key: row[key] for key in ("prompt", "key")} for row in rows] == prompts().to_pylist()
    assert {row["forq_finish_reason"] for row in rows} == {"stop"}
    assert left_behind(settings) == []


def test_failed_rows_alone_and_trees_are_a_question_of_parameters(
    client: TestClient, submit: Submit, database: Database
) -> None:
    job_id = submit()["job_id"]
    finish_shard(database, failing=(1,))
    failed = client.get(f"/v1/jobs/{job_id}/results", params={"failed": "true"})
    assert "failed.parquet" in failed.headers["content-disposition"]
    assert table_of(failed.content)["prompt"].to_pylist() == ["question 1"]
    trees = table_of(client.get(f"/v1/jobs/{job_id}/results", params={"with_trees": "true"}).content)
    assert trees["forq_tree"].to_pylist()[0][0]["kind"] == "root"


def test_results_can_be_had_while_the_job_runs(client: TestClient, submit: Submit, database: Database) -> None:
    job_id = submit(prompts(6))["job_id"]
    finish_shard(database)
    exported = table_of(client.get(f"/v1/jobs/{job_id}/results").content)
    assert exported["forq_output"].to_pylist() == ["an answer"] * 4 + [None] * 2


def test_a_job_without_failed_rows_has_an_empty_file_of_them(
    client: TestClient, submit: Submit, database: Database
) -> None:
    job_id = submit()["job_id"]
    finish_shard(database)
    assert table_of(client.get(f"/v1/jobs/{job_id}/results?failed=true").content).num_rows == 0
    assert client.get(f"/v1/jobs/{job_id}/results?failed=true&format=jsonl").content == b""


@pytest.mark.parametrize("accept", ["text/html", f"{PARQUET};q=0", "nonsense"])
def test_an_accept_header_that_neither_format_meets_is_a_406(client: TestClient, submit: Submit, accept: str) -> None:
    path = f"/v1/jobs/{submit()['job_id']}/results"
    assert_problem(client.get(path, headers={"Accept": accept}), 406, PARQUET)
    assert client.get(path, params={"format": "jsonl"}, headers={"Accept": accept}).status_code == 200


@pytest.mark.parametrize("params", [{"format": "csv"}, {"failed": "perhaps"}, {"with_trees": "2"}, {"formt": "jsonl"}])
def test_a_refused_results_parameter_is_a_422(client: TestClient, submit: Submit, params: dict[str, str]) -> None:
    assert_problem(client.get(f"/v1/jobs/{submit()['job_id']}/results", params=params), 422, "query.")


def test_an_input_that_is_elsewhere_is_a_404_that_names_no_folder(
    client: TestClient, submit: Submit, settings: Settings
) -> None:
    job_id = submit()["job_id"]
    for path in settings.data_dir.iterdir():
        path.unlink()
    problem = assert_problem(client.get(f"/v1/jobs/{job_id}/results"), 404, "not on this machine")
    assert str(settings.home) not in problem["detail"]


def test_a_damaged_input_is_the_servers_fault(client: TestClient, submit: Submit, settings: Settings) -> None:
    job_id = submit()["job_id"]
    for path in settings.data_dir.iterdir():
        path.write_bytes(b"damaged")
    problem = assert_problem(client.get(f"/v1/jobs/{job_id}/results"), 503, "cannot be written")
    assert str(settings.home) not in problem["detail"]
    assert left_behind(settings) == []
