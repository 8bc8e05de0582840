"""The loop of a training run, whatever it trains: resume, learn step by step, evaluate, keep checkpoints, write.

What a run reads and learns from is a subclass's. Every step's batch follows from the step's number alone, so a run that
was stopped and started again gives what it would have given.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from apar.errors import AparError, InputError
from apar.training import checkpoints
from apar.training.interrupts import Interrupts
from apar.training.log import Log
from apar.training.run_options import RunOptions


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth showing while a run goes on."""

    text: str
    step: int | None = None
    steps: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)


Report = Callable[[Event], None]
Options = TypeVar("Options", bound=RunOptions)
Result = TypeVar("Result")


@contextmanager
def locked(folder: Path, *, here: bool = True) -> Iterator[None]:
    """Hold a run's folder; only one of several processes that train together needs to (`here`).

    Raises:
        AparError: another process trains in it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        if here:
            lock.acquire(timeout=0)
        yield
    except Timeout:
        raise AparError(f"another process is training in {folder}: wait for it, or give another --out") from None
    finally:
        lock.release()


def check_base(base: Path) -> None:
    """
    Raises:
        InputError: it is no model folder.
    """
    if not (base / "config.json").is_file():
        raise InputError(f"{base} is no model folder: it has no config.json")


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """The part of the full rate that a step has: a linear rise over the warm-up, then half a cosine down to 0."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


class TrainingLoop(ABC, Generic[Options, Result]):
    """A subclass sets `steps` and `optimizer`, whose groups have their full rate as `rate`."""

    steps: int
    optimizer: torch.optim.Optimizer

    def __init__(self, options: Options, report: Report, *, is_main: bool = True) -> None:
        self.options = options
        self.is_main = is_main
        """Of several processes, the one that writes and shows."""
        self.report = report if is_main else lambda event: None
        self.step = 0
        self._tokens = 0
        """Tokens of this run of the program, and the seconds they took."""
        self._seconds = 0.0

    def go(self) -> Result:
        options, out = self.options, self.options.out
        folder = out / "checkpoints"
        saved = self._resume(folder)
        log = Log(out / "log.jsonl", self.step) if self.is_main else None
        eval_every = options.eval_every or max(1, self.steps // 10)
        with Interrupts() as interrupts:
            if log is not None and self.step == 0:
                self._evaluate(log)
            while self.step < self.steps:
                line = self._learn(interrupts)
                if line is None:
                    if saved != self.step:
                        self._save(folder)
                    return self._result(finished=False)
                self.step += 1
                if log is not None:
                    log.write(**line)
                    if self.step % eval_every == 0 or self.step == self.steps:
                        self._evaluate(log)
                        self._draw(log, out / "loss.png")
                self.report(Event("", self.step, self.steps, line))
                if self.step % options.save_every == 0 or self.step == self.steps:
                    self._save(folder)
                    saved = self.step
        if self.is_main:
            self._write()
        self._wait()
        return self._result(finished=True)

    @property
    def tokens_per_s(self) -> float | None:
        return round(self._tokens / self._seconds, 1) if self._seconds else None

    def last_held_out(self) -> Any:
        """What the last evaluation said, or None."""
        held_out = [line["held_out"] for line in Log.read(self.options.out / "log.jsonl") if "held_out" in line]
        return held_out[-1] if held_out else None

    def _rate(self) -> float:
        """Set this step's learning rates; returns which part of the full ones they are."""
        rate = learning_rate(self.step, self.steps, self.options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * rate
        return rate

    def _clip(self, parameters: list[torch.nn.Parameter]) -> float:
        """Limit the gradient's norm; returns what it was.

        Raises:
            AparError: it is no number.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm))
        if not math.isfinite(norm):
            raise AparError(f"the gradient of step {self.step + 1} is {norm}: lower --lr, or use --dtype fp32")
        return norm

    def _timed(self, tokens: int, seconds: float) -> dict[str, Any]:
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        return {"tokens": tokens, "seconds": round(seconds, 3)}

    def _resume(self, folder: Path) -> int | None:
        """Take up the newest checkpoint, if there is one; returns its step."""
        found = checkpoints.latest(folder)
        if found is None:
            return None
        self.step, state = found
        self._load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.report(Event(f"going on behind step {self.step} of {self.steps}"))
        return self.step

    def _save(self, folder: Path) -> None:
        if self.is_main:
            checkpoints.save(folder, self.step, {"weights": self._weights(), "optimizer": self.optimizer.state_dict()})
        self._wait()

    def _evaluate(self, log: Log) -> None:
        found = self._held_out()
        if found is not None:
            figures, text = found
            log.write(step=self.step, held_out=figures)
            self.report(Event(text, self.step, self.steps, {"held_out": figures}))

    def _wait(self) -> None:
        """For the other processes, where there are any."""

    @abstractmethod
    def _learn(self, interrupts: Interrupts) -> dict[str, Any] | None:
        """Learn from the step's batch; returns its line of the log.

        None, with the weights as they were, when asked to stop in the middle.
        """

    @abstractmethod
    def _held_out(self) -> tuple[Any, str] | None:
        """Evaluate on the held-out answers: the figures, and a line to show. None without any."""

    @abstractmethod
    def _draw(self, log: Log, path: Path) -> None: ...
    @abstractmethod
    def _weights(self) -> dict[str, Any]: ...
    @abstractmethod
    def _load_weights(self, weights: dict[str, Any]) -> None: ...
    @abstractmethod
    def _write(self) -> None:
        """Write what was trained, and `result.json`."""

    @abstractmethod
    def _result(self, *, finished: bool) -> Result: ...
