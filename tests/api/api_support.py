"""Inputs, a stand-in for the worker, and the check of a problem response."""

import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from db.session import Database
from jobs import leases, results
from jobs.results import Node, RowResult, SampleResult, Stats
from jobs.settings import DEFAULT_MODEL

MODEL = DEFAULT_MODEL
STATS = Stats(1, 0, 1, 3, 8, 1, 21, 8, 21, 0)
UNKNOWN_JOB = "01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"
Submit = Callable[..., dict[str, Any]]
"""The fixture `submit`."""


def prompts(num_rows: int = 3) -> pa.Table:
    return pa.table(
        {"prompt": [f"question {i}" for i in range(num_rows)], "key": pa.array(range(num_rows), pa.int16())}
    )


def parquet_bytes(table: pa.Table | None = None) -> bytes:
    sink = io.BytesIO()
    pq.write_table(prompts() if table is None else table, sink)
    return sink.getvalue()


def batch_lines(num_rows: int = 2) -> bytes:
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"question {i}"}]},
        }
        for i in range(num_rows)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def finish_shard(database: Database, *, failing: tuple[int, ...] = (), model: str = MODEL) -> leases.Lease:
    """Lease the next shard as a worker does, answer its rows (those in `failing` with an error), and end it."""
    lease = leases.acquire(database, model, "OWNER", 60.0)
    assert lease is not None
    rows = results.load(database, lease).rows
    sample = SampleResult("an answer", "stop", 5, 3, STATS, (Node(0, None, "root", 0, 0, 3, 0, 2, 0, 9),))
    ended = [
        RowResult(row.request_id, error_code="engine_error", error="it broke")
        if row.row_index in failing
        else RowResult(row.request_id, (sample,))
        for row in rows
    ]
    results.write(database, lease, ended)
    leases.finish(database, lease)
    return lease


def assert_problem(response: Any, status: int, *texts: str) -> dict[str, Any]:
    """A problem, or on the routes that OpenAI's clients know an error in their form."""
    if response.request.url.path.startswith(("/v1/files", "/v1/batches")):
        return assert_openai_error(response, status, *texts)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail"} <= body.keys()
    for text in texts:
        assert text in body["detail"]
    return body


def assert_openai_error(response: Any, status: int, *texts: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    for text in texts:
        assert text in body["error"]["message"]
    return body
