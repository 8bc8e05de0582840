"""Failpoints between any two steps of a shard's way, in a worker process of the harness; production code has none.

`install` wraps the functions that take these steps. The harness arms one failpoint at a time by a file; the first
worker that passes its seam takes the file away, says so in the journal and then kills (SIGKILL) or stops (SIGSTOP)
itself.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.chaos_harness.journal import Journal

SEAMS = {
    "bell_taken": "a doorbell was taken from the broker and not acknowledged yet",
    "bell_acked": "it was acknowledged, nothing is leased yet",
    "lease_committed": "a shard is leased, its job does not say that it runs",
    "lease_marking": "the job says so, uncommitted: its row is locked",
    "lease_taken": "the lease is in the worker's hands, no row is loaded",
    "result_computed": "results are computed, nothing is written",
    "rows_uncommitted": "they are written, uncommitted: the shard's row is locked (on SQLite the database)",
    "rows_committed": "they are committed, the worker does not know",
    "shard_ending": "all rows are stored, the shard is not ended",
    "shard_uncommitted": "its end is written, uncommitted",
    "shard_completed": "its end is committed, the job has not been looked at",
    "job_uncommitted": "the job's end is written, uncommitted: its row is locked",
    "job_settled": "the job's end is committed",
}
NEED_A_BELL = ("bell_taken", "bell_acked")
NEED_A_JOBS_END = ("job_uncommitted", "job_settled")


class Failpoints:
    def __init__(self, folder: Path, journal: Journal, worker_id: str) -> None:
        self._armed = folder / "armed.json"
        self._journal = journal
        self._worker_id = worker_id
        self._skipped: dict[str, int] = {}
        self._lock = threading.Lock()

    def passing(self, seam: str) -> None:
        """Die or stop here, if the harness wants it."""
        if not self._armed.exists():
            return
        with self._lock, contextlib.suppress(FileNotFoundError):
            plan = json.loads(self._armed.read_text())
            if plan["seam"] != seam:
                return
            skipped = self._skipped.get(plan["id"], 0)
            if skipped < plan["skip"]:
                self._skipped[plan["id"]] = skipped + 1
                return
            self._armed.rename(self._armed.with_name(f"fired-{plan['id']}.json"))  # another worker may be first
            facts = {"id": plan["id"], "seam": seam, "action": plan["action"], "pid": os.getpid()}
            self._journal.write("seam", worker=self._worker_id, **facts)
            os.kill(os.getpid(), signal.SIGKILL if plan["action"] == "kill" else signal.SIGSTOP)


class _Call(threading.local):
    """Which wrapped function this `threading.Thread` is in, and how many transactions it has begun there."""

    name: str | None = None
    lease: Any = None
    num_transactions = 0


def install(failpoints: Failpoints, journal: Journal, worker_id: str) -> None:
    """Wrap the steps of this process."""
    from kombu.message import Message

    from db.session import Database
    from jobs import leases, results
    from jobs.errors import LeaseLost

    call = _Call()

    @contextlib.contextmanager
    def inside(name: str, lease: Any = None) -> Iterator[None]:
        call.name, call.lease, call.num_transactions = name, lease, 0
        try:
            yield
        finally:
            call.name = None

    def note(event: str, lease: Any, **facts: Any) -> None:
        journal.write(event, worker=worker_id, shard=lease.shard_id, token=lease.token, **facts)

    before = {("acquire", 2): "lease_committed"}
    uncommitted = {
        ("acquire", 2): "lease_marking",
        ("write", 1): "rows_uncommitted",
        ("finish", 1): "shard_uncommitted",
    }
    uncommitted[("finish", 2)] = "job_uncommitted"
    committed = {("write", 1): "rows_committed", ("finish", 1): "shard_completed", ("finish", 2): "job_settled"}
    events = {("write", 1): "stored", ("finish", 1): "done"}

    plain_write = Database.write

    @contextlib.contextmanager
    def write_transaction(self: Database) -> Iterator[Any]:
        if call.name is None:
            with plain_write(self) as connection:
                yield connection
            return
        call.num_transactions += 1
        step = (call.name, call.num_transactions)
        _pass(failpoints, before.get(step))
        with plain_write(self) as connection:
            yield connection
            _pass(failpoints, uncommitted.get(step))
        if step in events:
            note(events[step], call.lease)
        _pass(failpoints, committed.get(step))

    plain_acquire, plain_store, plain_finish = leases.acquire, results.write, leases.finish

    @wraps(plain_acquire)
    def acquire(*args: Any, **options: Any) -> Any:
        with inside("acquire"):
            lease = plain_acquire(*args, **options)
        if lease is not None:
            note("lease", lease)
            failpoints.passing("lease_taken")
        return lease

    @wraps(plain_store)
    def store(database: Database, lease: Any, rows: list[Any]) -> None:
        if not rows:
            return
        note("attempt", lease, requests=[row.request_id for row in rows])
        failpoints.passing("result_computed")
        try:
            with inside("write", lease):
                plain_store(database, lease, rows)
        except LeaseLost:
            note("fenced", lease)
            raise

    @wraps(plain_finish)
    def finish(database: Database, lease: Any) -> None:
        failpoints.passing("shard_ending")
        with inside("finish", lease):
            plain_finish(database, lease)

    Database.write, leases.acquire, results.write, leases.finish = write_transaction, acquire, store, finish  # type: ignore[method-assign,assignment]
    Message.ack_log_error = _between(failpoints, "bell_taken", Message.ack_log_error, "bell_acked")


def _pass(failpoints: Failpoints, seam: str | None) -> None:
    if seam is not None:
        failpoints.passing(seam)


def _between(failpoints: Failpoints, before: str, function: Callable[..., Any], after: str) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        failpoints.passing(before)
        result = function(*args, **options)
        failpoints.passing(after)
        return result

    return wrapped
