"""A worker process whose engine does what a prompt says: `python faulty_worker.py WORKER_ID`.

The process, its shard loops, its heartbeat and Celery are the real ones; the engine answers in milliseconds (the chaos
harness's). A prompt with "kill" in it takes the process down, one with "dead core" raises as vLLM does when its core
process has died, and one with "out of memory" raises so once in the life of FORQ_HOME.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.chaos_harness.fake_engine import BytesEncoder, FakeBackend
from benchmarks.chaos_harness.journal import Journal
from jobs.logs import configure_logs
from jobs.settings import get_settings
from worker.backend import Done, Sample
from worker.runtime import WorkerProcess

MODEL = "smollm2-135m"


class OutOfMemoryError(RuntimeError):
    """As torch's."""


class EngineDeadError(Exception):
    """As vLLM's."""


class FaultyBackend(FakeBackend):
    def __init__(self, home: Path, latency_s: tuple[float, float]) -> None:
        super().__init__(Journal(Path(os.environ.get("JOURNAL", os.devnull))), latency_s, 64)
        self._marker = home / "has-been-out-of-memory"
        self._fault: Exception | None = None

    def _add(self, engine: None, sample: Sample, done: Done) -> None:
        super()._add(engine, sample, done)
        prompt = bytes(sample.token_ids).decode()
        if "kill" in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if "dead core" in prompt:
            self._fault = EngineDeadError("EngineCore encountered an issue.")
        if "out of memory" in prompt and not self._marker.exists():
            self._marker.touch()
            self._fault = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def _advance(self, engine: None) -> None:
        if self._fault is not None:
            raise self._fault
        super()._advance(engine)


class FaultyWorker(WorkerProcess):
    def _load(self) -> Any:
        latency_s = float(os.environ.get("LATENCY_S", "0.01"))
        backend = FaultyBackend(self._settings.home, (latency_s, 2 * latency_s))
        backend.start()
        return backend, BytesEncoder()


if __name__ == "__main__":
    configure_logs()
    sys.exit(FaultyWorker(get_settings(), MODEL, sys.argv[1]).run())
