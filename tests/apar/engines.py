"""Real engines in this process, watched from outside: what each step computed, held and sampled, and what left it."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import CHILD, EOS, FLOAT32_ERROR, FORK, MAX_MODEL_LEN, GapRecorder

from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult

SCHEDULER = "apar.scheduler.ForkingScheduler"
BLOCK_SIZE = 32
ROOMY, TIGHT = 400, MAX_MODEL_LEN // BLOCK_SIZE
"""KV blocks. The second is what one path of `max_model_len` takes, the least that vLLM accepts."""
MOST_STEPS = 20_000

_numbers = itertools.count()


@dataclass
class Step:
    """One engine step with something to compute. Threads are vLLM request ids."""

    computed: dict[str, tuple[int, int]]
    """Per thread: the positions [start, end) of its path that the step computed."""
    started: set[str]
    held: dict[str, tuple[int, list[int]]]
    """Per running thread: how many leading positions it had in the cache behind the step, and in which blocks."""
    sampled: dict[str, list[int]] = field(default_factory=dict)


class Watch:
    """Wraps a scheduler's ways in and out. Synchronous scheduling only."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.steps: list[Step] = []
        self.prompts: dict[str, list[int]] = {}
        """What each thread started from."""
        self.roots: list[str] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.on_step: Callable[[Any], None] = lambda scheduler: None
        """Called behind each `schedule`."""
        self._step: Step | None = None
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(scheduler, name, getattr(self, f"_{name}")(getattr(scheduler, name)))

    def clear(self) -> None:
        self.steps, self.prompts, self.roots, self.finished, self.preempted = [], {}, [], [], []
        self.on_step = lambda scheduler: None

    def _add_request(self, add_request: Any) -> Any:
        def watched(request: Any) -> None:
            self.roots.append(request.request_id)
            add_request(request)

        return watched

    def _schedule(self, schedule: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._step = None
            self.preempted.extend(output.preempted_req_ids or ())
            if output.total_num_scheduled_tokens:
                self._step = self._seen(output)
                self.steps.append(self._step)
            self.on_step(self.scheduler)
            return output

        return watched

    def _seen(self, output: Any) -> Step:
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in new:
            starts[request.req_id] = request.num_computed_tokens
            self.prompts[request.req_id] = list(request.prompt_token_ids)
        computed = {name: (starts[name], starts[name] + n) for name, n in output.num_scheduled_tokens.items()}
        manager, held = self.scheduler.kv_cache_manager, {}
        for request in self.scheduler.running:
            name, n = request.request_id, request.num_computed_tokens
            held[name] = (n, list(manager.get_block_ids(name)[0][: -(-n // self.scheduler.block_size)]))
        return Step(computed, {request.req_id for request in new} | set(cached.resumed_req_ids), held)

    def _update_from_output(self, update: Any) -> Any:
        def watched(scheduled: Any, ran: Any) -> Any:
            if self._step is not None and ran.sampled_token_ids:
                index = ran.req_id_to_index
                self._step.sampled = {name: list(ran.sampled_token_ids[i]) for name, i in index.items()}
            by_client = update(scheduled, ran)
            for outputs in by_client.values():
                for output in outputs.outputs:
                    assert output.request_id in self.roots, f"{output.request_id} is nobody's request"
                    assert output.request_id not in self.finished, f"{output.request_id} has ended already"
                    if output.finish_reason is not None:
                        self.finished.append(output.request_id)
            return by_client

        return watched


class Reference:
    """The sequential decoder on a model, remembering each answer and how sure it was of it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._known: dict[str, tuple[ReferenceResult, float]] = {}

    def decode(
        self,
        prompt: Sequence[int],
        *,
        limits: ForkLimits | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        ignore_eos: bool = False,
        **options: Any,
    ) -> tuple[ReferenceResult, float]:
        """The answer, and how near the second best token came in it."""
        key = repr((list(prompt), limits, max_model_len, ignore_eos, sorted(options.items())))
        if key not in self._known:
            recorder, eos = GapRecorder(), [] if ignore_eos else [EOS]
            decoder = ReferenceDecoder(
                self.model, ControlTokens(FORK, CHILD), limits or ForkLimits(), eos, max_model_len, recorder
            )
            self._known[key] = decoder.decode(prompt, **options), recorder.smallest_gap
        return self._known[key]

    def rows(self, prompt: Sequence[int], **options: Any) -> list[torch.Tensor]:
        """Log-probabilities before anything is banned, float32 [vocabulary], of each output token."""
        rows: list[tuple[torch.Tensor, int]] = []

        def model(**inputs: Any) -> Any:
            output = self.model(**inputs)
            rows.append((output.logits[0, -1].float().log_softmax(-1), -1))
            return output

        model.device = self.model.device  # type: ignore[attr-defined]

        def choose(logits_v: torch.Tensor) -> int:
            token = int(logits_v.argmax())
            rows[-1] = (rows[-1][0], token)
            return token

        control = ControlTokens(FORK, CHILD)
        decoder = ReferenceDecoder(model, control, ForkLimits(), [EOS], MAX_MODEL_LEN, choose)
        result = decoder.decode(prompt, **options)
        kept = [row for row, token in rows if token not in (FORK, EOS)]
        return [*kept, rows[-1][0]] if result.token_ids[-1] == EOS else kept


class Engine:
    """vLLM's in-process engine, stepped by hand: a request that never ends is an error, not a test that hangs."""

    def __init__(self, llm: Any, num_blocks: int, reference: Reference | None = None) -> None:
        self.llm = llm.llm_engine
        self.core = self.llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.num_blocks = num_blocks
        self.reference = reference
        self.watch = Watch(self.scheduler)
        self.internal: dict[str, str] = {}
        """Internal request ids by ours."""

    def add(self, prompt: Sequence[int], params: Any, **more: Any) -> str:
        name = f"r{next(_numbers)}"
        self.internal[name] = self.llm.add_request(name, {"prompt_token_ids": list(prompt)}, params, **more)
        return name

    def step(self) -> list[Any]:
        return list(self.llm.step())

    def finish(self, most_steps: int = MOST_STEPS) -> dict[str, Any]:
        """Step until everything that was added has ended; the last output of each."""
        last: dict[str, Any] = {}
        for _ in range(most_steps):
            if not self.llm.has_unfinished_requests():
                self.step()  # whoever ended is forgotten by the model runner, too
                return last
            unfinished = self.scheduler.has_requests()
            for output in self.step():
                if output.finished:
                    last[output.request_id] = output
            assert unfinished or self.scheduler.has_requests() or not self.llm.has_unfinished_requests(), (
                "a request has not ended, and nothing of it runs or waits"
            )
        raise AssertionError(f"requests have not ended after {most_steps} steps")

    def run(self, prompts: Sequence[Sequence[int]], params: Any, **more: Any) -> list[Any]:
        """All prompts at once, each with its own parameters or the same."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        names = [self.add(prompt, own, **more) for prompt, own in zip(prompts, each, strict=True)]
        outputs = self.finish()
        return [outputs[name] for name in names]

    def assert_expected(self, prompt: Sequence[int], output: Any, **options: Any) -> bool:
        """Tokens, reason and nodes are the reference's; False where float32 leaves the answer open."""
        assert self.reference is not None
        expected, gap = self.reference.decode(prompt, **options)
        if gap < FLOAT32_ERROR:
            return False
        answer = output.outputs[0]
        assert list(answer.token_ids) == expected.token_ids
        assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_token_id)
        nodes = [(*node[:3], *node[4:6]) for node in receipt(output)["nodes"]]
        assert nodes == [(node.node, node.parent, node.kind, node.start, node.end) for node in expected.nodes]
        return True

    def reset(self) -> None:
        """End what a failed test has left."""
        with contextlib.suppress(Exception):
            self.llm.abort_request(list(self.internal), internal=False)
            self.step()
        self.scheduler.finish_requests(None, _aborted())
        self.watch.clear()
        self.internal.clear()

    def assert_empty(self) -> None:
        """Everything that was taken has been given back."""
        scheduler = self.scheduler
        assert not self.llm.has_unfinished_requests()
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_blocks
        assert (scheduler.requests, scheduler.running) == ({}, [])
        if hasattr(scheduler, "_groups"):
            assert (scheduler._threads, scheduler._groups) == ({}, {})
            assert len(scheduler._waiting_threads) == 0
        assert len(set(self.watch.finished)) == len(self.watch.finished)


def receipt(output: Any) -> dict[str, Any]:
    found: dict[str, Any] = output.kv_transfer_params["apar"]
    return found


def stats(output: Any) -> dict[str, int]:
    found: dict[str, int] = receipt(output)["stats"]
    return found


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def greedy(max_tokens: int, apar: Any = None, **more: Any) -> Any:
    from vllm import SamplingParams

    extra = {} if apar is None else {"extra_args": {"apar": apar}}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **extra, **more})


@contextlib.contextmanager
def engine(
    folder: Path, num_blocks: int, reference: Reference | None = None, *, scheduler: str | None = SCHEDULER, **args: Any
) -> Iterator[Engine]:
    """Start an engine; stock vLLM with `scheduler=None`."""
    from vllm import LLM

    ours = {} if scheduler is None else {"scheduler_cls": scheduler}
    defaults = {
        "dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64,
        "num_gpu_blocks_override": num_blocks + 1, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
        "generation_config": "vllm",
    }  # fmt: skip
    llm = LLM(**{"model": str(folder), **ours, **defaults, **args})
    try:
        yield Engine(llm, num_blocks, reference)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
