"""Drives the real command line: every call is a process of its own, on a FORQ_HOME and a port of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import select

from db.models import Output, Request, Shard
from db.session import Database

MODEL = "smollm2-135m"
PATIENCE_S = 180.0
UP_S = 300.0

CONFIGURATION = """
[models.{model}]
path = "{path}"
kv_budget = "256 MiB"
max_model_len = 512
default_max_tokens = 16

[queue]
shard_rows = 8
rows_in_flight = 16
heartbeat_s = 1.0
sweep_s = 1.0
flush_s = 0.1
drain_s = 5.0

[drop]
poll_s = 0.2
settle_s = 0.5
"""


class Service:
    """One FORQ_HOME; `up` and `down` as a user types them."""

    def __init__(self, home: Path, configuration: str) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        home.mkdir(parents=True)
        (home / "forq.toml").write_text(configuration)
        self.work = home / "work"
        self.work.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
        self._environment = {**kept, "FORQ_HOME": str(home), "FORQ_API_PORT": str(self.port)}

    @property
    def environment(self) -> dict[str, str]:
        """Of every command."""
        return self._environment

    def start(self, *args: object, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *map(str, args)],
            cwd=self.work, env=self._environment, text=True, **options,
        )  # fmt: skip

    def forq(self, *args: object, timeout_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
        """Run one command to its end."""
        process = self.start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ask(self, *args: object, exit_code: int = 0) -> Any:
        """Run a command with --json and read what it prints."""
        done = self.forq(*args, "--json")
        assert done.returncode == exit_code, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def up(self) -> None:
        done = self.forq("up", "--detach", timeout_s=UP_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("forq is up (pid ")

    def down(self) -> None:
        done = self.forq("down")
        assert (done.returncode, done.stdout) == (0, "forq is down\n"), done.stderr

    def pid_of(self, part: str) -> int:
        return next(int(found["pid"]) for found in self.ask("ps") if found["part"] == part)

    def write(self, name: str, columns: dict[str, Any]) -> Path:
        path = self.work / name
        pq.write_table(pa.table(columns), path)
        return path

    def submit(self, path: Path, *args: object) -> str:
        answer = self.ask("submit", path, "--model", MODEL, *args)
        assert list(answer) == ["job_id"]
        return str(answer["job_id"])

    def wait(self, job: str, exit_code: int = 0) -> dict[str, Any]:
        status: dict[str, Any] = self.ask("wait", job, "--timeout", PATIENCE_S, exit_code=exit_code)
        return status

    def export(self, job: str, *args: object) -> list[dict[str, Any]]:
        path = self.work / f"{job}.parquet"
        done = self.forq("export", job, path, *args)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started here, however it came about: all of them work below FORQ_HOME."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if Path(process.cwd()).is_relative_to(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        database = Database(f"sqlite:///{self.home / 'forq.db'}")
        try:
            yield database
        finally:
            database.dispose()

    def outputs(self, job: str) -> dict[int, str]:
        """Request id → text of every stored answer."""
        with self.database() as database, database.read() as connection:
            rows = connection.execute(
                select(Output.request_id, Output.text).join(Request).where(Request.job_id == job)
            ).all()
        assert len({row.request_id for row in rows}) == len(rows)
        return {row.request_id: row.text for row in rows}

    def check_every_row_is_there_once(self, job: str, num_rows: int) -> None:
        with self.database() as database, database.read() as connection:
            rows = connection.execute(
                select(Request.row_index, Request.state).where(Request.job_id == job).order_by(Request.row_index)
            ).all()
            shards = connection.execute(select(Shard.__table__).where(Shard.job_id == job)).all()
        assert [row.row_index for row in rows] == list(range(num_rows))
        assert {row.state for row in rows} == {"completed"}
        assert sum(shard.num_completed for shard in shards) == num_rows
        assert {shard.state for shard in shards} == {"done"}
        assert len(self.outputs(job)) == num_rows

    def clean_up(self) -> None:
        """Whatever a failed test left behind."""
        self.forq("down")
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.1) -> Any:
    """Look until it is so, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(every_s)
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
