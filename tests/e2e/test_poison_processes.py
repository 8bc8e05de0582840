"""Worker processes that die of a row, by a signal or with their engine: the rows are found, all others are answered."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select
from ulid import ULID

from db.models import Job, Output, Request, Worker
from db.session import Database
from db.upgrade import upgrade
from jobs import leases
from jobs.settings import QueueSettings, Settings
from jobs.submit import SubmitOptions, submit_file
from worker.runtime import EXIT_ENGINE_DEAD

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
PATIENCE_S = 120.0
QUEUE = {"shard_rows": 8, "max_attempts": 2, "heartbeat_s": 0.2, "sweep_s": 0.2, "flush_s": 0.05, "lease_s": 30.0}
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "home").mkdir()
    settings = Settings(home=tmp_path / "home", queue=QueueSettings.model_validate(QUEUE))
    upgrade(settings.sqlalchemy_url)
    return settings


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sqlalchemy_url)
    yield database
    database.dispose()


def submit(database: Database, settings: Settings, prompts: list[str], tenant: str) -> str:
    path = settings.home / "input.parquet"
    pq.write_table(pa.table({"prompt": prompts}), path)
    return submit_file(database, settings, path, SubmitOptions(model=MODEL, tenant=tenant)).job_id


def live(settings: Settings, database: Database, jobs: list[str]) -> int | None:
    """One worker's life: its exit code, or None if it was stopped because the jobs had ended."""
    worker_id = str(ULID())
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
    variables = {f"FORQ_QUEUE__{name.upper()}": str(value) for name, value in QUEUE.items()}
    with (settings.home / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("faulty_worker.py"), worker_id],
            cwd=settings.home, stdout=log, stderr=log,
            env={**kept, **variables, "FORQ_HOME": str(settings.home), "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    try:
        for _ in range(int(PATIENCE_S / 0.1)):
            try:
                code = process.wait(0.1)
            except subprocess.TimeoutExpired:
                with database.read() as connection:
                    states = connection.scalars(select(Job.state).where(Job.id.in_(jobs))).all()
                if set(states) == {"completed"}:
                    return None
                continue
            if code < 0:  # as the supervisor does for a worker that could not say it itself
                leases.release_all(database, worker_id, crashed=True)
            return code
        raise AssertionError((settings.home / "worker.log").read_text()[-4000:])
    finally:
        process.kill()
        process.wait()


def test_rows_that_end_their_worker_are_found_and_nobody_else_loses_a_row(
    settings: Settings, database: Database
) -> None:
    guilty = {2: "kill", 5: "dead core"}
    theirs = submit(
        database, settings, [f"{guilty.get(row, 'out of memory' if row == 6 else 'plain')} {row}" for row in range(8)],
        tenant="red",
    )  # fmt: skip
    ours = submit(database, settings, [f"question {row}" for row in range(40)], tenant="blue")

    codes = []
    while (code := live(settings, database, [theirs, ours])) is not None:
        codes.append(code)
        assert len(codes) < 12, codes

    with database.read() as connection:
        rows = connection.execute(
            select(Request.job_id, Request.row_index, Request.state, Request.error_code, Request.error)
        ).all()
        num_outputs = Counter(connection.scalars(select(Request.job_id).join(Output, Output.request_id == Request.id)))
        reasons = connection.scalars(select(Worker.exit_reason)).all()
    poison = {row.row_index: row.error for row in rows if row.error_code is not None}
    assert sorted(poison) == sorted(guilty)
    assert all("the worker died 2 times while only this row was in its engine" in text for text in poison.values())
    assert num_outputs == {theirs: 6, ours: 40}
    assert {row.state for row in rows if row.job_id == ours} == {"completed"}
    assert set(codes) == {-signal.SIGKILL, EXIT_ENGINE_DEAD}
    assert len(codes) <= 8  # two together, one out of memory, two for each row, and what was at work beside
    told = [reason for reason in reasons if reason is not None]
    assert any("EngineDeadError" in reason for reason in told)
