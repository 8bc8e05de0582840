"""Small jobs for tests: files to submit, and a stand-in for the worker that answers them without an engine."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import func, select, text

from db.models import Job, Output, Request, RequestStats, Shard, ThreadNode
from db.session import Database
from jobs import leases, results
from jobs.reference_settings import ReferenceSettings
from jobs.settings import DEFAULT_MODEL, ModelAlias, QueueSettings, Settings
from jobs.submit import SubmitOptions, Submitted, submit_file

MODEL = DEFAULT_MODEL
OWNER = "0" * 26
LEASE_S = 60.0


def settings_in(home: Path, *, shard_rows: int = 4) -> Settings:
    models = {
        "other": ModelAlias(path=home),
        "forking": ModelAlias(path=home, fork_token="[Fork]", child_token="[Child]"),
        "plain-reference": ModelAlias(path=home, backend="reference"),
        "reference": ModelAlias(
            path=home, backend="reference", fork_token="[Fork]", child_token="[Child]",
            reference=ReferenceSettings(medusa=home / "heads"),
        ),
    }  # fmt: skip
    return Settings(home=home, queue=QueueSettings(shard_rows=shard_rows), models=models)


def write_table(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def submit_table(
    database: Database, settings: Settings, columns: dict[str, Any] | pa.Table, **options: Any
) -> Submitted:
    settings.home.mkdir(parents=True, exist_ok=True)
    path = write_table(settings.home.parent / "input.parquet", columns)
    return submit_file(database, settings, path, SubmitOptions(**{"model": MODEL, **options}))


def submit_rows(database: Database, settings: Settings, num_rows: int, **options: Any) -> str:
    return submit_table(database, settings, {"prompt": [f"question {i}" for i in range(num_rows)]}, **options).job_id


def sample(answer: str, *, prompt_tokens: int = 3, output_tokens: int = 2, num_nodes: int = 1) -> results.SampleResult:
    stats = results.Stats(
        threads=num_nodes,
        forks=num_nodes - 1,
        max_width=num_nodes,
        steps=output_tokens,
        peak_cached_tokens=prompt_tokens + output_tokens,
        peak_blocks=1,
        attended_tokens=10,
        sequential_peak_tokens=prompt_tokens + output_tokens,
        sequential_attended_tokens=20,
        preemptions=0,
    )
    # The first node has the whole text, or all of them a letter each, and the last one the rest.
    ends = [*range(1, num_nodes), len(answer)]
    nodes = tuple(
        results.Node(
            n, n - 1 if n else None, "root" if n == 0 else "detail" if n % 2 else "sibling", n, n, n + 1, 0,
            output_tokens, n, end,
        )
        for n, end in enumerate(ends)
    )  # fmt: skip
    return results.SampleResult(answer, "stop", prompt_tokens, output_tokens, stats, nodes)


def answered(row: results.PendingRow) -> results.RowResult:
    return results.RowResult(
        row.request_id, tuple(sample(f"answer {row.row_index}") for _ in range(row.sampling.n or 1))
    )


def drafted(row: results.PendingRow, **figures: Any) -> results.RowResult:
    """An answer of the reference backend."""
    plain = sample("drafted", output_tokens=8)
    assert plain.stats is not None
    said = {
        "forwards": 4, "hit_rate": 0.75, "acceptance_length": 7 / 3, "decoding_efficiency": 2.0, "draft_nodes": 40,
        "verify_nodes": 17, **figures,
    }  # fmt: skip
    return results.RowResult(row.request_id, (replace(plain, stats=replace(plain.stats, **said)),))


def failed(
    row: results.PendingRow, code: str = "engine_error", error: str = "the engine refused it"
) -> results.RowResult:
    return results.RowResult(row.request_id, error_code=code, error=error)


def acquire(database: Database, owner: str = OWNER, model: str = MODEL) -> leases.Lease:
    lease = leases.acquire(database, model, owner, LEASE_S)
    assert lease is not None, "no shard is free"
    return lease


def run_shard(
    database: Database, lease: leases.Lease, answer: Callable[[results.PendingRow], results.RowResult] = answered
) -> None:
    results.write(database, lease, [answer(row) for row in results.load(database, lease).rows])
    leases.finish(database, lease)


def drain(
    database: Database, answer: Callable[[results.PendingRow], results.RowResult] = answered, model: str = MODEL
) -> int:
    """Answer everything that waits, as one worker would. Returns the number of shards."""
    num_shards = 0
    while (lease := leases.acquire(database, model, OWNER, LEASE_S)) is not None:
        run_shard(database, lease, answer)
        num_shards += 1
    return num_shards


def expire_lease(database: Database, shard_id: int) -> None:
    """As if the worker had not sent a heartbeat for a year."""
    with database.write() as connection:
        connection.execute(
            text("UPDATE shards SET lease_expires_at = '2001-01-01 00:00:00.000000' WHERE id = :id"), {"id": shard_id}
        )


def job_state(database: Database, job_id: str) -> str:
    with database.read() as connection:
        return connection.execute(select(Job.state).where(Job.id == job_id)).scalar_one()


def requests_of(database: Database, job_id: str) -> list[Any]:
    with database.read() as connection:
        return list(
            connection.execute(select(Request.__table__).where(Request.job_id == job_id).order_by(Request.row_index))
        )


def shards_of(database: Database, job_id: str) -> list[Any]:
    with database.read() as connection:
        return list(connection.execute(select(Shard.__table__).where(Shard.job_id == job_id).order_by(Shard.ordinal)))


def num_rows_in_tables(database: Database) -> dict[str, int]:
    tables = (Job, Shard, Request, Output, RequestStats, ThreadNode)
    with database.read() as connection:
        return {
            table.__tablename__: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in tables
        }


def check_integrity(database: Database, job_id: str) -> None:
    """Every row is there once, counters say what the rows say, and outputs belong to completed rows alone."""
    with database.read() as connection:
        job = connection.execute(select(Job.__table__).where(Job.id == job_id)).one()
        shards = connection.execute(select(Shard.__table__).where(Shard.job_id == job_id).order_by(Shard.ordinal)).all()
        requests = connection.execute(
            select(Request.__table__).where(Request.job_id == job_id).order_by(Request.row_index)
        ).all()
        outputs = connection.execute(
            select(Output.request_id, Output.output_tokens).join(Request).where(Request.job_id == job_id)
        ).all()
        num_stats = connection.execute(
            select(func.count()).select_from(RequestStats).join(Request).where(Request.job_id == job_id)
        ).scalar_one()
    assert [row.row_index for row in requests] == list(range(job.num_rows))
    assert [(shard.start_row, shard.end_row) for shard in shards] == _tiles(shards, job.num_rows)
    tokens: dict[int, int] = {}
    for output in outputs:
        tokens[output.request_id] = tokens.get(output.request_id, 0) + output.output_tokens
    assert set(tokens) == {row.id for row in requests if row.state == "completed"}
    assert len(outputs) == num_stats
    for shard in shards:
        rows = requests[shard.start_row : shard.end_row]
        ended = [sum(row.state == state for row in rows) for state in ("completed", "failed", "cancelled")]
        assert [shard.num_completed, shard.num_failed, shard.num_cancelled] == ended
        assert shard.output_tokens == sum(tokens.get(row.id, 0) for row in rows)
        assert (shard.lease_owner is not None) == (shard.state == "leased") == (shard.lease_expires_at is not None)
        if shard.state in ("done", "cancelled"):
            assert sum(ended) == len(rows)
    for row in requests:
        assert (row.error_code is not None) == (row.state == "failed")
        assert row.payload is not None or row.state == "failed"
    if job.state in ("completed", "failed", "cancelled"):
        assert all(shard.state in ("done", "cancelled") for shard in shards)
        counters = ("num_completed", "num_failed", "num_cancelled", "output_tokens")
        assert [getattr(job, name) for name in counters] == [
            sum(getattr(shard, name) for shard in shards) for name in counters
        ]
        assert job.finished_at is not None


def _tiles(shards: Iterable[Any], num_rows: int) -> list[tuple[int, int]]:
    sizes = [shard.end_row - shard.start_row for shard in shards]
    assert sum(sizes) == num_rows
    tiles, start = [], 0
    for size in sizes:
        tiles.append((start, start + size))
        start += size
    return tiles


def prompts_of(database: Database, submitted: Submitted) -> list[Any]:
    return [
        json.loads(row.payload) if row.payload else row.error_code for row in requests_of(database, submitted.job_id)
    ]


def raw_strings(values: list[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """A string column from bytes that nobody checked, as a careless writer makes it."""
    binary = pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary())
    return pa.Array.from_buffers(kind or pa.string(), len(binary), binary.buffers())
