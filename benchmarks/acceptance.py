"""The main job's promises, on a file of your own: all rows in order, bad rows alone, a worker killed half-way.

    python -m benchmarks.acceptance questions.parquet --prompt-column prompt --id-column question_id

Starts a service of its own in a temporary FORQ_HOME (with the machine's model cache), drives it through the command
line, and prints one JSON line per promise: what was counted, and whether it holds. Exit code 1 if one does not.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import func, select

from db.models import Output, Request
from db.session import Database
from jobs.settings import DEFAULT_MODEL, Settings, get_settings
from worker.models import resolve_model

KILL_AFTER_SHARE = 0.4
WAIT_S = 900.0


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt-column", default="prompt", show_default=True)
@click.option("--id-column")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--port", default=8798, show_default=True, help="Of the service's API.")
def main(file: Path, prompt_column: str, id_column: str | None, max_tokens: int, port: int) -> None:
    """Check the main job's promises on FILE."""
    model_path = resolve_model(DEFAULT_MODEL, get_settings(), report=lambda line: click.echo(line, err=True)).path
    with tempfile.TemporaryDirectory(prefix="forq-acceptance-") as folder:
        home = Path(folder)
        (home / "forq.toml").write_text(
            f'[models.{DEFAULT_MODEL}]\npath = "{model_path}"\nkv_budget = "1 GiB"\nmax_model_len = 2048\n'
            # Small shards, few rows at once: otherwise all answers of one length end, and are stored, in the same step.
            "[queue]\nshard_rows = 16\nrows_in_flight = 16\n"
        )
        service = _Service(home, port, ["--prompt-column", prompt_column, "--max-tokens", str(max_tokens)], id_column)
        service.forq("up", "--detach")
        try:
            results = [_all_rows(service, file), _bad_rows(service, file, prompt_column), _killed(service, file)]
        finally:
            service.forq("down")
    sys.exit(0 if all(results) else 1)


class _Service:
    def __init__(self, home: Path, port: int, options: list[str], id_column: str | None) -> None:
        self.home = home
        self.options = options + (["--id-column", id_column] if id_column else [])
        self.environment = {**os.environ, "FORQ_HOME": str(home), "FORQ_API_PORT": str(port)}
        self.database = Database(Settings(home=home).sqlalchemy_url)

    def forq(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "jobs.cli", *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        if done.returncode != 0:
            raise click.ClickException(f"forq {' '.join(arguments)}: {done.stderr.strip()}")
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    def submit(self, file: Path) -> str:
        return str(self.forq("submit", str(file), "--model", DEFAULT_MODEL, *self.options, "--json")["job_id"])

    def finish(self, job_id: str) -> tuple[dict[str, Any], pa.Table]:
        status = self.forq("wait", job_id, "--timeout", str(WAIT_S), "--json")
        answers = self.home / f"{job_id}.parquet"
        self.forq("export", job_id, str(answers))
        return status, pq.read_table(answers)


def _all_rows(service: _Service, file: Path) -> bool:
    source = pq.read_table(file)
    status, answers = service.finish(service.submit(file))
    complete = all(
        answers[name].null_count == 0
        for name in ("forq_output", "forq_finish_reason", "forq_prompt_tokens", "forq_output_tokens")
    )
    same = answers.select(source.column_names).equals(source)
    return _report(
        "all rows, in order, input untouched",
        complete and same and answers.num_rows == source.num_rows and status["state"] == "completed",
        rows=answers.num_rows, complete=complete, input_untouched=same,
        output_tokens=status["output_tokens"], seconds=_seconds(status),
    )  # fmt: skip


def _bad_rows(service: _Service, file: Path, prompt_column: str) -> bool:
    """A null prompt, one longer than the context, and `max_tokens` 0 among the good rows."""
    rows = pq.read_table(file).to_pylist()
    good = len(rows)
    for row in rows:
        row["sampling"] = {"max_tokens": None}
    template = {name: rows[0][name] for name in rows[0]}
    rows.insert(1, {**template, prompt_column: None})
    rows.insert(good // 2, {**template, prompt_column: "word " * 5000})
    rows.append({**template, "sampling": {"max_tokens": 0}})
    mixed = service.home / "mixed.parquet"
    pq.write_table(pa.Table.from_pylist(rows), mixed)
    status, answers = service.finish(service.submit(mixed))
    codes = [code for code in answers["forq_error_code"].to_pylist() if code]
    return _report(
        "bad rows end alone",
        status["state"] == "completed" and status["counts"]["completed"] == good and len(codes) == 3,
        state=status["state"], counts=status["counts"], codes=codes,
        messages=[text for text in answers["forq_error"].to_pylist() if text],
    )  # fmt: skip


def _killed(service: _Service, file: Path) -> bool:
    """kill -9 of the worker when some rows are stored and some are not."""
    job_id = service.submit(file)
    total = pq.read_metadata(file).num_rows
    _until(lambda: _num_stored(service, job_id) >= KILL_AFTER_SHARE * total, "some rows are stored")
    (worker,) = [part for part in service.forq("ps", "--json") if part["part"] == "worker"]
    os.kill(worker["pid"], signal.SIGKILL)
    log_lines_at_kill = len(_log(service))
    killed_at = time.monotonic()
    before = _stored(service, job_id)
    if len(before) == total:
        raise click.ClickException("every row was stored before the kill: take more rows or longer answers")
    _until(lambda: _num_stored(service, job_id) > len(before), "the next worker has stored a row")
    recovery_s = time.monotonic() - killed_at
    status, answers = service.finish(job_id)
    after = _stored(service, job_id)
    once = len(after) == total == answers.num_rows and status["counts"]["completed"] == total
    kept = all(after[request] == text for request, text in before.items())
    started = _rows_started(_log(service)[log_lines_at_kill:], job_id)
    return _report(
        "kill -9 loses and doubles nothing",
        once and kept and started == total - len(before),
        rows=total, stored_at_kill=len(before), each_row_once=once, stored_rows_unchanged=kept,
        rows_started_after_kill=started, recovery_s=round(recovery_s, 1),
    )  # fmt: skip


def _log(service: _Service) -> list[str]:
    return (service.home / "logs" / "worker.log").read_text(errors="replace").splitlines()


def _rows_started(lines: list[str], job_id: str) -> int:
    """Rows that the job's shards began with, by the worker's log: what was stored before must not be among them."""
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return sum(event["rows"] for event in events if event["event"] == "shard_started" and job_id in event["lease"])


def _stored(service: _Service, job_id: str) -> dict[int, str]:
    statement = select(Output.request_id, Output.text).join(Request, Request.id == Output.request_id)
    with service.database.read() as connection:
        return {row.request_id: row.text for row in connection.execute(statement.where(Request.job_id == job_id))}


def _num_stored(service: _Service, job_id: str) -> int:
    statement = select(func.count()).select_from(Output).join(Request, Request.id == Output.request_id)
    with service.database.read() as connection:
        return connection.execute(statement.where(Request.job_id == job_id)).scalar_one()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.05)


def _seconds(status: dict[str, Any]) -> float:
    from datetime import datetime

    started, finished = (datetime.fromisoformat(status[name]) for name in ("started_at", "finished_at"))
    return round((finished - started).total_seconds(), 1)


def _report(promise: str, holds: bool, **figures: Any) -> bool:
    print(json.dumps({"promise": promise, "holds": holds, **figures}), flush=True)
    return holds


if __name__ == "__main__":
    main()
