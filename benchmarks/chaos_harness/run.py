"""One run: set the service up on a fresh FORQ_HOME, break it, let it finish, judge it."""

import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos_harness.faults import OVERLAP_SHARE, Fault, Injector, deck
from benchmarks.chaos_harness.journal import History
from benchmarks.chaos_harness.judge import Verdict, install_audit, judge
from benchmarks.chaos_harness.left_over import left_over
from benchmarks.chaos_harness.plan import MODEL, Plan
from benchmarks.chaos_harness.postgres import Postgres, running_postgres
from benchmarks.chaos_harness.seams import SEAMS
from benchmarks.chaos_harness.system import System
from benchmarks.chaos_harness.traffic import Traffic
from db.session import Database
from db.upgrade import upgrade
from jobs.settings import DEFAULT_MODEL, Settings, get_settings

MAX_TOKENS = 16
FINISH_TIMEOUT_S = 600.0
CONFIGURATION = """
default_model = "{model}"
[models.{model}]
path = "{path}"
kv_budget = "256 MiB"
max_model_len = 512
default_max_tokens = 16
[queue]
shard_rows = 8
rows_in_flight = {rows_in_flight}
{timing}
[drop]
poll_s = 0.3
settle_s = 0.5
"""
SHORT_TIMING = "lease_s = 4.0\nheartbeat_s = 1.0\nsweep_s = 1.0\nflush_s = 0.2\ndrain_s = 5.0"


@dataclass(frozen=True)
class Options:
    rows: int
    faults: int
    seed: int
    database: str
    engine: str
    default_leases: bool
    latency_s: tuple[float, float]
    kinds: tuple[str, ...] = ()
    """Only these faults."""
    sabotage: str | None = None
    keep: Path | None = None
    """Where FORQ_HOME goes afterwards, to look into; None: it is removed."""

    @property
    def recovery_timeout_s(self) -> float:
        return 240.0 if self.default_leases or self.engine == "real" else 90.0


def run(options: Options) -> dict[str, Any]:
    with fresh_service(options) as system:
        settings = system.settings
        upgrade(settings.sqlalchemy_url)
        database = Database(settings.sqlalchemy_url)
        install_audit(database)
        traffic = Traffic(settings, database, options.rows, MAX_TOKENS)
        history = History(system.folder / "journal.jsonl")
        system.start()
        system.wait_up()
        _say("up")
        traffic.start()
        faults, stalled = _break(options, system, traffic, history)
        traffic.stop()
        finished_s = _wait_for_the_end(system, database)
        code = system.down()
        history.read()
        verdict = judge(
            database, settings, traffic.batches, history, settings.home / "work", fake=options.engine == "fake"
        )
        left, num_cleared = left_over(system, database)
        database.dispose()
        if code != 0:
            left.append(f"up ended with {code} when it was told to stop")
        stalled += ["the jobs did not end"] if finished_s is None else []
        return _report(options, system, faults, history, verdict, left, num_cleared, stalled)


def _break(options: Options, system: System, traffic: Traffic, history: History) -> tuple[list[Fault], list[str]]:
    rng = random.Random(options.seed)
    injector = Injector(system, traffic, history, rng, options.recovery_timeout_s)
    faults = deck(options.faults, rng, with_postgres=system.postgres is not None, kinds=options.kinds)
    stalled = []
    for number, fault in enumerate(faults):
        time.sleep(rng.uniform(0, 1.5))
        injector.inject(fault)
        overlaps = rng.random() < OVERLAP_SHARE
        recovered = overlaps or injector.wait_recovered(fault)
        if not recovered or any(note.startswith("PART NOT BACK") for note in fault.notes):
            stalled.append(str(fault))
        _say(f"{number + 1}/{len(faults)} {fault}{' (the next one comes at once)' if overlaps else ''}")
    return faults, stalled


def _wait_for_the_end(system: System, database: Database) -> float | None:
    """Until every job has ended and its results are in the outbox. None: it took too long."""
    from sqlalchemy import text
    from sqlalchemy.exc import SQLAlchemyError

    began = time.monotonic()
    while time.monotonic() < began + FINISH_TIMEOUT_S:
        system.tend()
        with contextlib.suppress(SQLAlchemyError), database.read() as connection:
            query = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'running', 'cancelling')"
            waiting = [path for path in (system.settings.home / "inbox").iterdir() if path.is_file()]
            if connection.execute(text(query)).scalar_one() == 0 and not waiting and _outbox_is_complete(system):
                return time.monotonic() - began
        time.sleep(0.5)
    return None


def _outbox_is_complete(system: System) -> bool:
    import json

    home = system.settings.home
    receipts = [json.loads(path.read_text()) for path in (home / "outbox").glob("*.job.json")]
    dropped = list((home / "accepted").glob("*.parquet")) if (home / "accepted").is_dir() else []
    return len(receipts) >= len(dropped) and all(receipt["results"] for receipt in receipts)


@contextlib.contextmanager
def fresh_service(options: Options) -> Iterator[System]:
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(running_postgres()) if options.database == "postgresql" else None
        home = Path(tempfile.mkdtemp(prefix="forq-chaos-", dir="/tmp"))  # a short path: it holds the broker's socket
        system = None
        try:
            settings = _prepare(options, home, postgres)
            system = System(settings, postgres)
            yield system
        finally:
            if system is not None:
                system.kill_all()
            if options.keep is not None:
                shutil.copytree(home, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
            tempfile.tempdir = None
            os.environ.pop("TMPDIR", None)
            shutil.rmtree(home, ignore_errors=True)


def _prepare(options: Options, home: Path, postgres: Postgres | None) -> Settings:
    """Write the configuration, and point this process and its children at it."""
    path = home / "model"
    if options.engine == "real":
        from worker.models import resolve_model

        path = resolve_model(DEFAULT_MODEL, get_settings(), report=_say).path
        get_settings.cache_clear()
    rows_in_flight = 24
    timing = "" if options.default_leases else SHORT_TIMING
    text = CONFIGURATION.format(model=MODEL, path=path, rows_in_flight=rows_in_flight, timing=timing)
    (home / "forq.toml").write_text(text)
    for folder in ("chaos", "scratch", "inbox"):
        (home / folder).mkdir()
    for name in [name for name in os.environ if name.startswith("FORQ_")]:
        del os.environ[name]
    os.environ.update(FORQ_HOME=str(home), FORQ_CONFIG=str(home / "forq.toml"), FORQ_API_PORT=str(_free_port()))
    os.environ["TMPDIR"] = tempfile.tempdir = str(home / "scratch")
    if postgres is not None:
        os.environ["FORQ_DATABASE_URL"] = postgres.url
    workers = 2 if options.engine == "fake" else 1
    Plan(options.engine, workers, options.latency_s, rows_in_flight, options.sabotage).save(home / "chaos")
    return get_settings()


def _report(
    options: Options, system: System, faults: list[Fault], history: History, verdict: Verdict,
    left: list[str], num_cleared: int, stalled: list[str],
) -> dict[str, Any]:  # fmt: skip
    again = sum(times > 1 for times in history.generations.values())
    seams = Counter(str(fault.seam) for fault in faults if fault.seam and fault.was_done)
    return {
        "database": options.database,
        "engine": options.engine,
        "seed": options.seed,
        "leases": "default" if options.default_leases else "short",
        "rows": verdict.rows,
        "jobs": verdict.jobs,
        "faults": sum(fault.was_done for fault in faults),
        "faults_not_done": len(faults) - sum(fault.was_done for fault in faults),
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "wrong": verdict.wrong,
        "fenced_accepted": verdict.fenced_accepted,
        "fenced_refused": history.num_fenced,
        "regenerated_share": round(again / verdict.rows, 5) if verdict.rows else None,
        "recovery_s": _by_kind(faults, lambda fault: fault.recovered_s),
        "recovery_of_all_shards_s": _by_kind(
            faults, lambda fault: fault.all_recovered_s if fault.interrupted else None
        ),
        "part_back_s": _by_kind(faults, lambda fault: fault.part_back_s),
        "faults_by_kind": dict(sorted(Counter(fault.kind for fault in faults).items())),
        "seams_hit": dict(sorted(seams.items())),
        "seams_missed": sorted(set(SEAMS) - set(seams)),
        "up_gave_up": system.gave_up,
        "stalled": stalled,
        "left_over": left,
        "temporaries_cleared_by_age": num_cleared,
        "violations": verdict.faults,
    }


def failed(report: dict[str, Any]) -> bool:
    counted = any(report[name] for name in ("lost", "doubled", "wrong", "fenced_accepted"))
    return counted or any(report[name] for name in ("stalled", "left_over", "violations"))


def _by_kind(faults: list[Fault], figure: Any) -> dict[str, dict[str, float]]:
    by_kind: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        if figure(fault) is not None:
            by_kind[fault.kind].append(figure(fault))
    return {
        kind: {"n": len(values), "median": round(median(values), 2), "worst": round(max(values), 2)}
        for kind, values in sorted(by_kind.items())
    }


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
