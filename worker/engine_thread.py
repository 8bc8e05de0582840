"""An engine in a `threading.Thread` of its own: commands in, finished samples out.

What is the same whichever engine it is: starting, taking commands between steps, and dying in public.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import structlog

from jobs.errors import Unavailable
from jobs.logs import place_of
from worker.backend import Done, EngineDead, EngineFacts, Sample

START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 30.0

OF_THE_DEVICE = ("CUDA", "HIP", "NCCL", "MPS")
"""How errors begin that tell of a GPU and not of what was computed on it."""
MAX_REASON_CHARS = 300

EngineT = TypeVar("EngineT")

log = structlog.get_logger()


class EngineThread(ABC, Generic[EngineT]):
    """A `worker.backend.Backend`. Start it with `start`, which returns when the weights are loaded.

    The methods to fill in run in the engine's own `threading.Thread`, one at a time.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._facts: EngineFacts | None = None
        self._failure: str | None = None
        self._ready = threading.Event()
        self._dead = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Samples that are not done; while there is one, the engine steps."""

    @abstractmethod
    def _build(self) -> tuple[EngineT, EngineFacts]:
        # Called in the thread that steps it: OpenMP settings and CUDA contexts belong to a thread.
        ...

    @abstractmethod
    def _add(self, engine: EngineT, sample: Sample, done: Done) -> None:
        """Take a sample in, or report that it is refused."""

    @abstractmethod
    def _abort(self, engine: EngineT, keys: Sequence[str]) -> None:
        """Forget samples; some keys may be unknown."""

    @abstractmethod
    def _advance(self, engine: EngineT) -> None:
        """Make a step, and report what has finished in it."""

    def _close(self, engine: EngineT) -> None:
        """Free what would outlive the thread."""

    def start(self) -> None:
        """Load the model.

        Raises:
            Unavailable: with the engine's reason.
        """
        self._thread.start()
        self._ready.wait(START_TIMEOUT_S)
        if self._failure is not None or self._facts is None:
            raise Unavailable(f"the engine cannot start: {self._failure or 'it took too long'}")

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "start() comes first"
        return self._facts

    @property
    def failure(self) -> str | None:
        return self._failure

    def wait_dead(self, timeout_s: float) -> bool:
        """True as soon as the engine has died; False after the timeout."""
        return self._dead.wait(timeout_s)

    def submit(self, samples: Iterable[Sample], done: Done) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure)
        self._inbox.put(("add", list(samples), done))

    def abort(self, keys: Iterable[str]) -> None:
        self._inbox.put(("abort", list(keys), None))

    def shutdown(self) -> None:
        self._inbox.put(("stop", None, None))
        self._thread.join(timeout=STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            engine, self._facts = self._build()
            self._ready.set()
            while self._take_commands(engine):
                if self.num_unfinished:
                    self._advance(engine)
            self._close(engine)
        except BaseException as error:  # whatever it is, the engine is gone, and everybody must know
            self._failure = _reason(error, rows_inside=self._ready.is_set())
            log.error("engine_died", reason=self._failure, where=place_of(error))
            self._dead.set()
            self._ready.set()

    def _take_commands(self, engine: EngineT) -> bool:
        """Carry out what has arrived; waits only while there is nothing to generate. False when told to stop."""
        block = not self.num_unfinished
        while True:
            try:
                command, value, done = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if command == "stop":
                return False
            if command == "add":
                for sample in value:
                    self._add(engine, sample, done)
            else:
                self._abort(engine, value)


def _reason(error: BaseException, *, rows_inside: bool) -> str:
    """What a log and the table of workers may know. While rows are in the engine, an error's text may quote them."""
    text = " ".join(str(error).split())[:MAX_REASON_CHARS]
    kind = type(error)
    if rows_inside and kind.__module__.partition(".")[0] != "torch" and not text.startswith(OF_THE_DEVICE):
        return kind.__name__
    return f"{kind.__name__}: {text or 'no message'}"
