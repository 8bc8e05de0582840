"""The reference engine behind the shard loop: samples queue up, the first one runs, a forward at a time.

Commands are looked at between forwards, so that an abort or a shutdown works in the middle of an answer.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog
import torch

from apar.errors import AparError
from jobs.settings import ModelAlias
from worker.backend import Done, EngineFacts, Finished, Refused, Sample
from worker.engine_thread import EngineThread
from worker.forking import Forking
from worker.reference.answer import Answer
from worker.reference.engine import ReferenceEngine

log = structlog.get_logger()


class ReferenceBackend(EngineThread[ReferenceEngine]):
    """Owns one `ReferenceEngine`."""

    def __init__(self, alias: ModelAlias, model_path: str, forking: Forking | None = None) -> None:
        super().__init__()
        self._alias = alias
        self._model_path = Path(model_path)
        self._forking = forking
        self._waiting: dict[str, tuple[Sample, Done]] = {}
        """By key, the next one first; the one that runs is among them until it is done."""
        self._answer: Answer | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def _build(self) -> tuple[ReferenceEngine, EngineFacts]:
        engine = ReferenceEngine(self._alias, self._model_path, self._forking)
        return engine, engine.facts

    def _add(self, engine: ReferenceEngine, sample: Sample, done: Done) -> None:
        self._waiting[sample.key] = sample, done

    def _abort(self, engine: ReferenceEngine, keys: Sequence[str]) -> None:
        for key in keys:
            self._waiting.pop(key, None)
        if self._answer is not None and self._answer.key not in self._waiting:
            self._answer = None

    def _advance(self, engine: ReferenceEngine) -> None:
        sample, done = next(iter(self._waiting.values()))
        outcome: Finished | Refused | None
        try:
            if self._answer is None:
                self._answer = engine.start(sample)
            outcome = self._answer.step()
        except Exception as error:  # whatever the model raises: the row is at fault, unless the device is gone
            outcome = Refused(sample.key, _why(error))
        if outcome is None:
            return
        self._answer = None
        if isinstance(outcome, Refused):
            log.warning("sample_refused", sample=sample.key, reason=outcome.message)
            engine.recover()
        del self._waiting[sample.key]
        done(outcome)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, AparError):
        return text
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return f"out of memory: lower max_tokens, shorten the prompt, or use a decoding that drafts less ({text[:200]})"
    return f"the model failed: {type(error).__name__}: {text[:500] or 'no message'}"
