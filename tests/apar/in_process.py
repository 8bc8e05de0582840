"""vLLM's in-process engine with our scheduler and a tiny model, stepped by hand where a test wants that."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from serving import SCHEDULER, Reference, differs
from tiny_models import MAX_MODEL_LEN, random_prompts

from apar.reference import ReferenceResult

ROOMY, TIGHT = 400, 16
"""KV blocks. The second is what one path of 512 tokens takes, the least that vLLM accepts."""


@dataclass
class Engine:
    llm: Any
    reference: Reference
    num_blocks: int

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def max_model_len(self) -> int:
        return int(self.llm.llm_engine.model_config.max_model_len)

    def expected(self, prompt: list[int], **options: Any) -> ReferenceResult:
        return self.reference(prompt, max_model_len=self.max_model_len, **options)

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        return list(self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False))

    def assert_empty(self) -> None:
        """Everything that was taken has been given back."""
        scheduler = self.scheduler
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_blocks
        assert (scheduler.requests, scheduler._threads, scheduler._groups) == ({}, {}, {})
        assert len(scheduler._waiting_threads) == 0
        assert scheduler.running == []


@contextlib.contextmanager
def started(folder: Path, reference: Reference, num_blocks: int, **options: Any) -> Iterator[Engine]:
    """An engine in this process, shut down when it is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        llm = LLM(
            model=str(folder), scheduler_cls=SCHEDULER, dtype="float32", block_size=32,
            max_model_len=min(MAX_MODEL_LEN, 32 * num_blocks), num_gpu_blocks_override=num_blocks + 1,
            kv_cache_memory_bytes=64 << 20, enforce_eager=True, max_num_seqs=64, **options,
        )  # fmt: skip
        try:
            yield Engine(llm, reference, num_blocks)
        finally:
            llm.llm_engine.engine_core.shutdown()


def greedy_params(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def assert_as_expected(engine: Engine, prompts: list[list[int]], outputs: list[Any], **options: Any) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, answer = engine.expected(prompt, **options), output.outputs[0]
        assert list(answer.token_ids) == expected.token_ids
        assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_token_id)
        assert not differs(output.kv_transfer_params["apar"], expected)


def total(outputs: list[Any], figure: str) -> int:
    return sum(output.kv_transfer_params["apar"]["stats"][figure] for output in outputs)


def run_with_aborts(engine: Engine, seed: int) -> None:
    """Requests of every length come and go at random; those that are left to end have to be right."""
    random, front = Random(seed), engine.llm.llm_engine
    prompts = random_prompts(30, seed=seed)
    coming = {f"r{i}": (prompt, random.choice([5, 40, 120, 400])) for i, prompt in enumerate(prompts)}
    waiting, running = list(coming), set[str]()
    finished: dict[str, Any] = {}
    aborted = set[str]()
    while waiting or front.has_unfinished_requests():
        for _ in range(random.randrange(3)):
            if waiting:
                name = waiting.pop()
                prompt, max_tokens = coming[name]
                front.add_request(name, {"prompt_token_ids": prompt}, greedy_params(max_tokens))
                running.add(name)
        if running and random.random() < 0.1:
            name = random.choice(sorted(running))
            front.abort_request([name])
            running.discard(name)
            aborted.add(name)
        for output in front.step():
            if output.finished:
                running.discard(output.request_id)
                finished[output.request_id] = output
    assert len(aborted) > 3
    assert set(finished) | aborted == set(coming)
    for name in finished.keys() - aborted:
        prompt, max_tokens = coming[name]
        assert_as_expected(engine, [prompt], [finished[name]], max_tokens=max_tokens)
    while engine.core.scheduler.has_requests() or engine.core.batch_queue:
        front.step()
    engine.assert_empty()
