"""`forq up` with an engine that computes nothing and quotes its prompts wherever an engine can: the worst for leaks.

    python -m quoting_worker up --model ALIAS        the real command, whose worker is this module
    python -m quoting_worker --model ALIAS --id ID   that worker; all but its engine is real

What a prompt says decides what becomes of it: it is answered, refused, fails its tokenizer, or takes the engine along.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from jobs import cli, supervisor
from jobs.logs import configure_logs
from jobs.settings import get_settings
from jobs.supervisor import Part, Supervisor
from worker.backend import Done, EngineFacts, Finished, Refused, Sample
from worker.engine_thread import EngineThread
from worker.runtime import WorkerProcess

REFUSED, PANICS, DIES = "[refused by the engine]", "[the tokenizer panics]", "[the engine dies]"
MAX_MODEL_LEN = 2048


class PanicError(BaseException):
    """As a panic in a tokenizer's Rust code comes to Python."""


class QuotingEncoder:
    """As much of `worker.prompts.PromptEncoder` as the shard loop uses: a token is a byte."""

    decoder = None

    def encode_prompt(self, text: str) -> list[int]:
        if PANICS in text:
            raise PanicError(f"called `unwrap` on {text!r}")
        return list(text.encode())

    encode_text = encode_prompt

    def encode_chat(self, messages: Iterable[Mapping[str, str]]) -> list[int]:
        return self.encode_prompt("\n".join(message["content"] for message in messages))


class QuotingBackend(EngineThread[None]):
    """Answers with the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[tuple[Sample, Done]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def _build(self) -> tuple[None, EngineFacts]:
        return None, EngineFacts("quoting", "1", 16, 4096, MAX_MODEL_LEN, MAX_MODEL_LEN, 8)

    def _add(self, engine: None, sample: Sample, done: Done) -> None:
        self._running.append((sample, done))

    def _abort(self, engine: None, keys: Sequence[str]) -> None:
        self._running = [(sample, done) for sample, done in self._running if sample.key not in keys]

    def _advance(self, engine: None) -> None:
        sample, done = self._running.pop()
        text = bytes(sample.token_ids).decode()
        if DIES in text:
            raise RuntimeError(f"cannot compute {text!r}, which are {sample.token_ids}")
        if REFUSED in text:
            done(Refused(sample.key, f"cannot take {text!r}"))
        else:
            done(Finished(sample.key, text, "stop", (1, 2, 3), None))


class QuotingWorker(WorkerProcess):
    def _load(self) -> Any:
        backend = QuotingBackend()
        backend.start()
        return backend, QuotingEncoder()


class QuotingSupervisor(Supervisor):
    def _make_parts(self) -> list[Part]:
        worker, *others = super()._make_parts()
        worker.command = [sys.executable, "-m", "quoting_worker", "--model", self.model]
        return [worker, *others]


@click.command()
@click.option("--model", required=True)
@click.option("--id", "worker_id", required=True)
def main(model: str, worker_id: str) -> None:
    configure_logs()
    sys.exit(QuotingWorker(get_settings(), model, worker_id).run())


if __name__ == "__main__":
    if sys.argv[1] == "up":
        supervisor.Supervisor = QuotingSupervisor  # type: ignore[misc]
        cli.main()
    main()
