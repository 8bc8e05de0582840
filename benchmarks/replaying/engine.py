"""One side of the benchmark in a process of its own: a fresh engine, all requests, the step log.

    python -m benchmarks.replaying.engine TASK.json OUTCOME.json

Receives a `Task`; leaves an `Outcome`. The engine's core runs in this process, so that its scheduler can be watched.
The clock runs from the first request's arrival to the last one's end: start-up and a warm-up stand before it. The CPU's
matrix products are prepared anew for each number of rows that they have not met: a warm-up of all requests meets them.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.replaying.counting import StepLog, Watch
from benchmarks.replaying.scripts import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Task:
    """What one side runs. `engine_args` are vLLM's own, equal on both sides but for the scheduler."""

    engine_args: dict[str, Any]
    prompts: list[list[int]]
    replays: list[str]
    """Per prompt, `Replay.to_text`."""
    concurrency: int
    """Requests in the engine at once; the next one arrives when one ends."""
    warm_up: int
    """Requests that run before the clock does."""


@dataclass(frozen=True)
class Outcome:
    """What came of it; lists are in the order of the prompts."""

    seconds: float
    outputs: list[list[int]]
    finish_reasons: list[str | None]
    spans: list[tuple[int, int]]
    """Of engine steps: the first one the request ran in, and the number of steps run when it had ended."""
    stats: list[dict[str, int] | None]
    """What the forking scheduler itself reports of the request; None from vLLM's own."""
    log: StepLog


def main() -> None:
    from worker.engine import prepare_environment

    task_file, outcome_file = (Path(name) for name in sys.argv[1:])
    prepare_environment()
    outcome = run(Task(**json.loads(task_file.read_text())))
    outcome_file.write_text(json.dumps(asdict(outcome)))


def read_outcome(file: Path) -> Outcome:
    values = json.loads(file.read_text())
    return Outcome(**{**values, "log": StepLog(**values["log"])})


def run(task: Task) -> Outcome:
    """Build the engine, warm it up, replay all requests. Needs `VLLM_ENABLE_V1_MULTIPROCESSING=0`."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**task.engine_args))
    # Reversed prompts, so that nothing of the warm-up is found in the prefix cache.
    warm_up = [prompt[::-1] for prompt in task.prompts[: task.warm_up]]
    _Run(engine, replace(task, prompts=warm_up)).outcome()
    engine.reset_prefix_cache()
    return _Run(engine, task).outcome()


class _Run:
    """Sends a task's requests through an engine, at most `concurrency` at a time."""

    def __init__(self, engine: "LLMEngine", task: Task) -> None:
        self._engine, self._task = engine, task
        self._numbers: dict[str, int] = {}
        """Number of the request by the two ids that vLLM knows it under: ours, and its own inside the engine."""
        self._internal_ids: list[str] = []

    def outcome(self) -> Outcome:
        num_requests = len(self._task.prompts)
        outputs: list[Any] = [None] * num_requests
        ends, left = [0] * num_requests, num_requests
        scheduler = self._engine.engine_core.engine_core.scheduler
        with Watch(scheduler, self._numbers.keys()) as log:
            started = time.perf_counter()
            while len(self._internal_ids) < min(self._task.concurrency, num_requests):
                self._add_next()
            while left:
                for output in self._engine.step():
                    if output.finished:
                        number = self._numbers[output.request_id]
                        outputs[number], ends[number] = output, log.num_steps
                        left -= 1
                        if len(self._internal_ids) < num_requests:
                            self._add_next()
            seconds = time.perf_counter() - started
        return Outcome(
            seconds=seconds,
            outputs=[list(output.outputs[0].token_ids) for output in outputs],
            finish_reasons=[output.outputs[0].finish_reason for output in outputs],
            spans=[(log.first_steps[name], end) for name, end in zip(self._internal_ids, ends, strict=True)],
            stats=[((output.kv_transfer_params or {}).get("apar") or {}).get("stats") for output in outputs],
            log=log,
        )

    def _add_next(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = len(self._internal_ids)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={EXTRA_ARGS_KEY: self._task.replays[number]},
        )
        prompt = {"prompt_token_ids": self._task.prompts[number]}
        internal = self._engine.add_request(str(number), prompt, sampling)
        self._internal_ids.append(internal)
        self._numbers[str(number)] = self._numbers[internal] = number


if __name__ == "__main__":
    main()
