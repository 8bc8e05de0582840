"""The worker of `benchmarks.bounds`: the real process and shard loop over an engine that answers at once."""

import os
import sys
from pathlib import Path
from typing import Any

from ulid import ULID

from benchmarks.chaos_harness.fake_engine import BytesEncoder, FakeBackend
from benchmarks.chaos_harness.journal import Journal
from benchmarks.chaos_harness.plan import MODEL
from jobs.logs import configure_logs
from jobs.settings import get_settings
from worker.runtime import WorkerProcess

MAX_NUM_SEQS = 256


class BoundsWorker(WorkerProcess):
    def _load(self) -> Any:
        backend = FakeBackend(Journal(Path(os.devnull)), (0.0, 0.0), MAX_NUM_SEQS)
        backend.start()
        return backend, BytesEncoder()


if __name__ == "__main__":
    configure_logs()
    sys.exit(BoundsWorker(get_settings(), MODEL, str(ULID())).run())
