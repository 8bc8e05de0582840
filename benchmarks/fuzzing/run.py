"""Submits inputs one after the other, and judges how each of them ended; see `benchmarks.fuzz`."""

import json
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import click
from sqlalchemy import select

from benchmarks.console import progress
from benchmarks.fuzzing.inputs import KINDS, Input, make
from db.models import Request
from db.session import Database
from db.upgrade import upgrade
from jobs.drop.job_toml import read_options
from jobs.errors import ForqError
from jobs.settings import Limits, Settings
from jobs.submit import SubmitOptions, submit_file

HANG_S = 10.0
JOBS_PER_DATABASE = 2000
"""Then a new one: a job list that only grows would measure SQLite."""


@click.command()
@click.option("--inputs", default=2000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep inputs that fail there.")
@click.option("--json", "as_json", is_flag=True, help="Only the last line.")
def main(inputs: int, seed: int, kinds: str, keep: Path | None, as_json: bool) -> None:
    named = kinds.split(",")
    unknown = [kind for kind in named if kind not in KINDS]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is no kind of input: use {', '.join(KINDS)}")
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory(prefix="forq-fuzz-") as folder:
        home = Path(folder)
        database, settings = _service(home / "0")
        for number in range(inputs):
            if number and number % JOBS_PER_DATABASE == 0:
                database.dispose()
                database, settings = _service(home / str(number))
            kind = named[number % len(named)]
            made = make(kind, Random(f"{seed}/{number}"))
            started = time.monotonic()
            outcome, trouble = _submit(database, settings, made, home / "input")
            seconds = time.monotonic() - started
            if seconds > HANG_S:
                trouble = trouble or f"took {seconds:.1f} s"
            outcomes[outcome] += 1
            slowest = max(slowest, (round(seconds, 2), f"{seed}/{number} {kind}"))
            if trouble:
                failures.append(f"{seed}/{number} {kind}: {trouble.strip().splitlines()[-1]}")
                _keep(keep, f"{seed}-{number}", made, trouble)
                if not as_json:
                    click.echo(failures[-1])
            progress("inputs", number + 1, inputs)
        database.dispose()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found = {
        "inputs": inputs,
        "seed": seed,
        **dict(sorted(outcomes.items())),
        "failures": len(failures),
        "hangs": sum("took " in line for line in failures),
        "slowest_s": slowest[0],
        "slowest": slowest[1],
        "peak_bytes": peak,
    }
    click.echo(json.dumps(found))
    sys.exit(1 if failures else 0)


def _service(home: Path) -> tuple[Database, Settings]:
    settings = Settings(home=home, limits=Limits(submit_memory_bytes=1 << 30, submit_stall_s=1))
    database = Database(settings.sqlalchemy_url)
    upgrade(settings.sqlalchemy_url)
    return database, settings


def _submit(database: Database, settings: Settings, made: Input, folder: Path) -> tuple[str, str]:
    """How it ended, and what is wrong with that (nothing: an empty text)."""
    folder.mkdir(exist_ok=True)
    path = folder / made.name
    path.write_bytes(made.data)
    try:
        if made.job_toml is not None:
            (folder / "in.job.toml").write_bytes(made.job_toml)
            options = read_options(folder / "in.job.toml", settings)
        else:
            options = SubmitOptions(model=settings.default_model, template=made.template, sampling=made.sampling)
        submitted = submit_file(database, settings, path, options)
    except ForqError as error:
        line = str(error)
        clean = line and "\n" not in line and len(line) < 2000 and line.isprintable()
        return "refused", "" if clean else f"not one clean line: {line[:300]!r}"
    except Exception:
        return "raised", traceback.format_exc()
    return "taken", _faults(database, submitted.job_id)


def _faults(database: Database, job_id: str) -> str:
    with database.read() as connection:
        rows: Any = connection.execute(
            select(Request.state, Request.payload, Request.error_code, Request.error).where(Request.job_id == job_id)
        ).all()
    for row in rows:
        if (row.state == "failed") != (row.error_code is not None) or (row.payload is None) != (row.state == "failed"):
            return f"a row is {row.state} with error {row.error_code}"
        if row.error is not None and ("\n" in row.error or not row.error):
            return f"a row's error is not one line: {row.error[:200]!r}"
        if row.payload is not None:
            json.loads(row.payload)
    return "" if rows else "a job without rows"


def _keep(keep: Path | None, name: str, made: Input, trouble: str) -> None:
    if keep is None:
        return
    keep.mkdir(parents=True, exist_ok=True)
    (keep / f"{name}-{made.name}").write_bytes(made.data)
    said = {"kind": made.kind, "template": made.template, "sampling": repr(made.sampling), "trouble": trouble}
    (keep / f"{name}.json").write_text(json.dumps(said, indent=1))
    if made.job_toml is not None:
        (keep / f"{name}.job.toml").write_bytes(made.job_toml)
