"""A worker process whose engine dies: it gives everything back at once and leaves with a reason and an exit code."""

import os
import subprocess
import sys
from pathlib import Path

from scripted import shards_of, submit
from sqlalchemy import select

from db.models import Worker
from db.session import Database
from jobs import leases
from jobs.settings import DEFAULT_MODEL, Settings
from worker.runtime import EXIT_ENGINE_DEAD

WORKER_ID = "W" * 26

# The process that dies is a real one; only its engine is a stand-in that reports its death when told to.
PROGRAM = """
import threading
from jobs.logs import configure_logs
from jobs.settings import get_settings
from worker.runtime import WorkerProcess

class DyingBackend:
    failure = "RuntimeError: out of memory"
    def wait_dead(self, timeout_s):
        return True

configure_logs()
process = WorkerProcess(get_settings(), "smollm2-135m", worker_id="W" * 26)
process._register()
threading.Thread(target=process._watch_engine, args=(DyingBackend(),)).start()
threading.Event().wait(60)  # a main thread that waits for the dead engine must not keep the process
"""


def test_a_dead_engine_releases_the_leases_and_ends_the_process_with_its_reason(
    database: Database, sqlite_url: str, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path / "home")
    job_id = submit(database, settings, 4)
    assert leases.acquire(database, DEFAULT_MODEL, WORKER_ID, 600) is not None

    environment = {**os.environ, "FORQ_HOME": str(settings.home), "FORQ_DATABASE_URL": sqlite_url}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == EXIT_ENGINE_DEAD, done.stderr
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr
    (shard,) = shards_of(database, job_id)
    assert (shard.state, shard.lease_owner, shard.attempts) == ("queued", None, 1)
    with database.read() as connection:
        worker = connection.execute(select(Worker.state, Worker.exit_reason).where(Worker.id == WORKER_ID)).one()
    assert worker.state == "exited"
    assert "out of memory" in worker.exit_reason
