"""A worker process of the harness: the real `WorkerProcess`, with failpoints, a journal and, by plan, a fake engine.

python -m benchmarks.chaos_harness.worker_entry --model ALIAS --id WORKER_ID      (started by up_entry)
"""

import os
import sys
from typing import Any

import click

from benchmarks.chaos_harness.fake_engine import BytesEncoder, FakeBackend
from benchmarks.chaos_harness.journal import Journal
from benchmarks.chaos_harness.plan import Plan, folder_in
from benchmarks.chaos_harness.seams import Failpoints, install
from jobs.logs import configure_logs
from jobs.settings import get_settings
from worker.runtime import WorkerProcess


class FakeWorker(WorkerProcess):
    def __init__(self, *args: Any, journal: Journal, plan: Plan) -> None:
        super().__init__(*args)
        self._journal, self._plan = journal, plan

    def _load(self) -> Any:
        backend = FakeBackend(self._journal, self._plan.latency_s, self._plan.rows_in_flight // 2)
        backend.start()
        return backend, BytesEncoder()


@click.command()
@click.option("--model", required=True)
@click.option("--id", "worker_id", required=True)
def main(model: str, worker_id: str) -> None:
    settings = get_settings()
    configure_logs()
    folder = folder_in(settings.home)
    plan, journal = Plan.load(folder), Journal(folder / "journal.jsonl")
    journal.write("start", worker=worker_id, pid=os.getpid())
    if plan.sabotage == "fence":
        _take_the_fence_away()
    install(Failpoints(folder, journal, worker_id), journal, worker_id)
    if plan.engine == "fake":
        worker: WorkerProcess = FakeWorker(settings, model, worker_id, journal=journal, plan=plan)
    else:
        worker = WorkerProcess(settings, model, worker_id)
    sys.exit(worker.run())


def _take_the_fence_away() -> None:
    from db.models import Shard
    from jobs import results

    results.fenced = lambda lease: Shard.id == lease.shard_id  # type: ignore[assignment,attr-defined]


if __name__ == "__main__":
    main()
