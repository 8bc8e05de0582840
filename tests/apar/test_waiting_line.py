"""Who may start while generation is paused or adapters are short, and how long what preempted threads left is kept."""

from pathlib import Path
from typing import Any

import pytest
from pipeline import EOS, VOCAB_SIZE, Pipeline
from tiny_models import make_tiny_model
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from apar.options import ForkLimits

MAX_STEPS = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("line") / "tiny")  # for its config.json


def pipeline(folder: Path, num_blocks: int, **options: Any) -> Pipeline:
    return Pipeline(folder, num_blocks=num_blocks, max_model_len=40, seed=5, asynchronous=False, **options)


def prompts(num: int) -> dict[str, list[int]]:
    return {f"r{i}": [5 + (i * 5 + j * (i + 3)) % (VOCAB_SIZE - 5) for j in range(6)] for i in range(num)}


def step_until(engine: Pipeline, done: Any) -> None:
    for _ in range(MAX_STEPS):
        if done():
            return
        engine.step()
    raise AssertionError("it does not come to that")


def assert_right(engine: Pipeline, asked: dict[str, list[int]], max_tokens: int) -> None:
    for name, prompt in asked.items():
        expected = engine.expected(prompt, max_tokens=max_tokens)
        assert engine.tokens[name] == expected.token_ids, name


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_pause_that_waits_lets_started_requests_end_forks_and_all(folder: Path, asynchronous: bool) -> None:
    engine = Pipeline(folder, num_blocks=20, max_model_len=40, seed=5, asynchronous=asynchronous)
    asked = prompts(24)
    for name, prompt in asked.items():
        engine.add(name, prompt, greedy(60))
    scheduler = engine.scheduler
    line = scheduler._waiting_threads
    # Paused while threads of started requests wait: some to be resumed, some to run for the first time.
    step_until(engine, lambda: line.fresh_children() and line.resumable(1))
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    started = {name for name, group in scheduler._groups.items() if group.threads[0].started_step}
    fresh = scheduler._groups.keys() - started
    assert fresh
    step_until(engine, lambda: not scheduler.get_num_unfinished_requests())
    assert started <= engine.ends.keys()
    assert not any(engine.tokens[name] for name in fresh)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step_until(engine, lambda: not engine.busy())
    assert_right(engine, asked, 60)
    engine.assert_empty()


def test_a_pause_of_everything_moves_nothing(folder: Path) -> None:
    engine = pipeline(folder, 20)
    asked = prompts(24)
    for name, prompt in asked.items():
        engine.add(name, prompt, greedy(60))
    scheduler = engine.scheduler
    step_until(engine, lambda: len(scheduler._waiting_threads.fresh_children()) > 1)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    before = ([request.request_id for request in scheduler.running], len(scheduler._waiting_threads))
    for _ in range(5):
        assert scheduler.schedule().total_num_scheduled_tokens == 0
    assert ([request.request_id for request in scheduler.running], len(scheduler._waiting_threads)) == before
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step_until(engine, lambda: not engine.busy())
    assert_right(engine, asked, 60)
    engine.assert_empty()


def test_a_request_whose_adapter_finds_no_place_holds_up_nobody(folder: Path) -> None:
    engine = pipeline(folder, 60, max_num_seqs=4)
    scheduler = engine.scheduler
    scheduler.lora_config = type("LoRAConfig", (), {"max_loras": 1})()
    asked = prompts(9)
    # One runs with the first adapter; six wait for the second, in front of two that need none.
    for number, (name, prompt) in enumerate(asked.items()):
        engine.add(name, prompt, greedy(30))
        if number < 7:
            adapter = LoRARequest(f"adapter{bool(number)}", 1 + bool(number), "/nowhere")
            scheduler.requests[name].lora_request = adapter
    engine.step()
    assert {name for name, tokens in engine.tokens.items() if tokens or name in engine.ends} == {"r0", "r7", "r8"}
    step_until(engine, lambda: not engine.busy())
    assert_right(engine, asked, 30)
    engine.assert_empty()


def test_what_the_next_to_resume_left_is_reused_last(folder: Path) -> None:
    engine = pipeline(folder, 14, limits=ForkLimits(max_width=4))
    asked = prompts(12)
    for name, prompt in asked.items():
        engine.add(name, prompt, greedy(60))
    scheduler = engine.scheduler
    line, pool = scheduler._waiting_threads, scheduler.kv_cache_manager.block_pool

    def cached(thread: Any) -> list[int]:
        marked = [block for block, mark in thread.left.blocks if mark is not None and block.block_hash is mark]
        return [block.block_id for block in marked if not block.ref_cnt]

    step_until(engine, lambda: len(line.resumable(2)) == 2 and all(cached(thread) for thread in line.resumable(2)))
    first, second = line.resumable(2)
    ours = [*reversed(cached(second)), *reversed(cached(first))]
    ours = [block for i, block in enumerate(ours) if block not in ours[i + 1 :]]  # shared ones go with the first
    before = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    scheduler._partial_blocks.keep_longest([first, second])
    after = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert after[-len(ours) :] == ours
    assert sorted(after) == sorted(before)
    assert [block for block in after if block not in ours] == [block for block in before if block not in ours]
    step_until(engine, lambda: not engine.busy())
    assert_right(engine, asked, 60)
    engine.assert_empty()


def test_an_answer_that_ends_leaves_no_thread_in_line(folder: Path) -> None:
    """The line counts the children that have never run, and must not lose count when they are dropped unrun."""
    engine = pipeline(folder, 12)
    asked = prompts(20)
    for name, prompt in asked.items():
        engine.add(name, prompt, greedy(12))
    line = engine.scheduler._waiting_threads
    most = 0
    while engine.busy():
        engine.step()
        waiting = [thread for thread in line._started if thread.parent is not None and not thread.started_step]
        assert line._num_forks == len(waiting)
        most = max(most, len(waiting))
    assert most > 1
    assert line._num_forks == 0
    assert EOS in {token for tokens in engine.tokens.values() for token in tokens}
