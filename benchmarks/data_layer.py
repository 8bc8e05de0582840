"""How fast and how lean the data layer is: submit, export and a status poll, each in a fresh process.

    python benchmarks/data_layer.py --rows 200000 --json

The input is written by a process of its own, so that no figure counts its memory. Peak memory is the kernel's VmHWM of
the measured process. With `--status-rows N` a job of N rows is put into the database and then, while it runs, polled
50 times. Exits with 1 where a limit is passed: 30 s and 400 MB for submit and export, 20 ms for a poll.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

MAX_S, MAX_MB, MAX_POLL_MS = 30.0, 400.0, 20.0
NUM_POLLS = 50
PROMPT_WORDS = 60
OWNER = "0" * 26


@click.group(invoke_without_command=True)
@click.option("--rows", default=200_000, show_default=True, help="Rows of the submitted file.")
@click.option("--status-rows", default=0, show_default=True, help="Rows of the job that is polled; 0 for no poll.")
@click.option("--database-url", help="An empty database; default a SQLite file in a temporary folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def main(context: click.Context, rows: int, status_rows: int, database_url: str | None, as_json: bool) -> None:
    if context.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory(prefix="forq-benchmark-") as folder:
        environment = {**os.environ, "FORQ_HOME": f"{folder}/home", "FORQ_CONFIG": ""}
        if database_url:
            environment["FORQ_DATABASE_URL"] = database_url
        run = _runner(Path(folder), environment)
        run("upgrade-step")
        figures: dict[str, Any] = {
            "rows": rows,
            "database": "sqlite" if not database_url else database_url.split(":")[0],
        }
        if rows:
            run("write-step", str(rows))
            figures["submit"] = run("submit-step")
            run("finish-step", figures["submit"]["job_id"])
            figures["export"] = run("export-step", figures["submit"]["job_id"])
        if status_rows:
            run("write-step", str(status_rows))
            submitted = run("submit-step")
            figures["status"] = {"rows": status_rows, **run("poll-step", submitted["job_id"])}
            figures["submit_of_status_rows"] = submitted
    faults = _faults(figures)
    click.echo(json.dumps({**figures, "faults": faults}) if as_json else _table(figures, faults))
    sys.exit(1 if faults else 0)


def _runner(folder: Path, environment: dict[str, str]) -> Callable[..., Any]:
    def run(step: str, *arguments: str) -> Any:
        command = [sys.executable, __file__, step, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout or "null")

    return run


def _faults(figures: dict[str, Any]) -> list[str]:
    faults = []
    for step in ("submit", "export"):
        if step in figures and figures[step]["seconds"] > MAX_S:
            faults.append(f"{step} took {figures[step]['seconds']} s, the limit is {MAX_S}")
        if step in figures and figures[step]["peak_mb"] > MAX_MB:
            faults.append(f"{step} used {figures[step]['peak_mb']} MB, the limit is {MAX_MB}")
    if "status" in figures and figures["status"]["poll_ms"] > MAX_POLL_MS:
        faults.append(f"a poll took {figures['status']['poll_ms']} ms, the limit is {MAX_POLL_MS}")
    return faults


def _table(figures: dict[str, Any], faults: list[str]) -> str:
    lines = [f"{figures['rows']} rows on {figures['database']}"]
    for step in ("submit", "export", "submit_of_status_rows"):
        if step in figures:
            lines.append(f"{step}: {figures[step]['seconds']} s, peak {figures[step]['peak_mb']} MB")
    if "status" in figures:
        lines.append(f"status poll with {figures['status']['rows']} rows: {figures['status']['poll_ms']} ms (median)")
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in faults)])


def _peak_mb() -> float:
    """The process's peak resident memory, in MB of 10^6 bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return round(int(match[1]) * 1024 / 1e6, 1)


def _open() -> tuple[Any, Any]:
    from db.session import Database
    from jobs.settings import get_settings

    settings = get_settings()
    return Database(settings.sqlalchemy_url), settings


@main.command(hidden=True)
def upgrade_step() -> None:
    from db.upgrade import upgrade
    from jobs.settings import get_settings

    upgrade(get_settings().sqlalchemy_url)


@main.command(hidden=True)
@click.argument("rows", type=int)
def write_step(rows: int) -> None:
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(5000)]
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter("input.parquet", schema) as writer:
        for start in range(0, rows, 50_000):
            ids = list(range(start, min(rows, start + 50_000)))
            prompts = [" ".join(chance.choices(words, k=PROMPT_WORDS)) for _ in ids]
            writer.write_table(pa.table({"id": ids, "prompt": prompts}, schema=schema))


@main.command(hidden=True)
def submit_step() -> None:
    from jobs.submit import SubmitOptions, submit_file

    database, settings = _open()
    start_s = time.perf_counter()
    options = SubmitOptions(model=settings.default_model, prompt_column="prompt", id_column="id")
    submitted = submit_file(database, settings, Path("input.parquet"), options)
    seconds = round(time.perf_counter() - start_s, 2)
    click.echo(json.dumps({"job_id": submitted.job_id, "seconds": seconds, "peak_mb": _peak_mb()}))


@main.command(hidden=True)
@click.argument("job_id")
def finish_step(job_id: str) -> None:
    """Answer every row with about 400 characters, in SQL: the worker's write path is not what is measured here."""
    from sqlalchemy import text

    from jobs.leases import sweep

    database, _ = _open()
    answer = "hex(randomblob(200))" if database.is_sqlite else "repeat(md5(id::text), 12)"
    mine = {"job": job_id}
    with database.write() as connection:
        connection.execute(text("INSERT INTO outputs (request_id, sample, text, finish_reason, prompt_tokens, "
                                f"output_tokens) SELECT id, 0, {answer}, 'stop', 80, 100 FROM requests "
                                "WHERE job_id = :job"), mine)  # fmt: skip
        connection.execute(text("INSERT INTO request_stats (request_id, sample, threads, forks, max_width, steps, "
                                "peak_cached_tokens, peak_blocks, attended_tokens, sequential_peak_tokens, "
                                "sequential_attended_tokens, preemptions) "
                                "SELECT id, 0, 1, 0, 1, 100, 180, 6, 13000, 180, 13000, 0 "
                                "FROM requests WHERE job_id = :job"), mine)  # fmt: skip
        connection.execute(text("UPDATE requests SET state = 'completed' WHERE job_id = :job"), mine)
        connection.execute(text("UPDATE shards SET state = 'done', num_completed = end_row - start_row, "
                                "output_tokens = 100 * (end_row - start_row) WHERE job_id = :job"), mine)  # fmt: skip
    sweep(database)


@main.command(hidden=True)
@click.argument("job_id")
def export_step(job_id: str) -> None:
    from jobs.export import export_job

    database, settings = _open()
    start_s = time.perf_counter()
    exported = export_job(database, settings, job_id, Path("output.parquet").absolute())
    seconds = round(time.perf_counter() - start_s, 2)
    click.echo(json.dumps({"rows": exported.num_rows, "seconds": seconds, "peak_mb": _peak_mb()}))


@main.command(hidden=True)
@click.argument("job_id")
def poll_step(job_id: str) -> None:
    from jobs.leases import acquire
    from jobs.service import job_status

    database, settings = _open()
    assert acquire(database, settings.default_model, OWNER, 60.0) is not None
    polls_ms = []
    for _ in range(NUM_POLLS):
        start_s = time.perf_counter()
        status = job_status(database, job_id)
        polls_ms.append((time.perf_counter() - start_s) * 1000)
    assert status["state"] == "running"
    click.echo(json.dumps({"poll_ms": round(statistics.median(polls_ms), 2), "poll_max_ms": round(max(polls_ms), 2)}))


if __name__ == "__main__":
    main()
