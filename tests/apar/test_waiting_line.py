"""Who may start while generation is paused or adapters are short, and how long what preempted threads left is kept."""

import time
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


def greedy(max_tokens: int, **apar: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args={"apar": apar})


def ask(engine: Pipeline, num: int, params: SamplingParams) -> dict[str, list[int]]:
    """Add so many requests; returns their prompts."""
    asked = prompts(num)
    for name, prompt in asked.items():
        engine.add(name, prompt, params.clone())
    return asked


def assert_ends_right(engine: Pipeline, asked: dict[str, list[int]], max_tokens: int) -> None:
    step_until(engine, lambda: not engine.busy())
    assert_right(engine, asked, max_tokens)
    engine.assert_empty()


def use_adapters(engine: Pipeline, adapters: dict[str, int]) -> None:
    """Of requests that were added, one place in the batch for all of them."""
    engine.scheduler.lora_config = type("LoRAConfig", (), {"max_loras": 1})()
    for name, number in adapters.items():
        engine.scheduler.requests[name].lora_request = LoRARequest(f"adapter{number}", number, "/nowhere")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_pause_that_waits_lets_started_requests_end_forks_and_all(folder: Path, asynchronous: bool) -> None:
    engine = Pipeline(folder, num_blocks=20, max_model_len=40, seed=5, asynchronous=asynchronous)
    asked = ask(engine, 24, greedy(60))
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
    assert_ends_right(engine, asked, 60)


def test_a_pause_of_everything_moves_nothing(folder: Path) -> None:
    engine = pipeline(folder, 20)
    asked = ask(engine, 24, greedy(60))
    scheduler = engine.scheduler
    step_until(engine, lambda: len(scheduler._waiting_threads.fresh_children()) > 1)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    before = ([request.request_id for request in scheduler.running], len(scheduler._waiting_threads))
    for _ in range(5):
        assert scheduler.schedule().total_num_scheduled_tokens == 0
    assert ([request.request_id for request in scheduler.running], len(scheduler._waiting_threads)) == before
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert_ends_right(engine, asked, 60)


def test_a_request_whose_adapter_finds_no_place_holds_up_nobody(folder: Path) -> None:
    engine = pipeline(folder, 60, max_num_seqs=4)
    asked = ask(engine, 9, greedy(30))
    # One runs with the first adapter; six wait for the second, in front of two that need none.
    use_adapters(engine, {"r0": 1} | {f"r{number}": 2 for number in range(1, 7)})
    engine.step()
    assert {name for name, tokens in engine.tokens.items() if tokens or name in engine.ends} == {"r0", "r7", "r8"}
    assert_ends_right(engine, asked, 30)


def test_who_may_not_start_takes_no_adapters_place(folder: Path) -> None:
    engine = pipeline(folder, 60)
    asked = prompts(13)
    for name, prompt in list(asked.items())[:8]:
        engine.add(name, prompt, greedy(30, pool="a", pool_share=0.2))
    engine.step()
    # The first pool has its share, and its next requests bring an adapter; another pool's brings another.
    for name, prompt in list(asked.items())[8:]:
        pool = {"pool": "b", "pool_share": 0.9} if name == "r12" else {"pool": "a", "pool_share": 0.2}
        engine.add(name, prompt, greedy(30, **pool))
    use_adapters(engine, {f"r{number}": 1 for number in range(8, 12)} | {"r12": 2})
    engine.step()
    engine.step()
    assert engine.tokens["r12"] or "r12" in engine.ends
    assert_ends_right(engine, asked, 30)


def test_what_waits_behind_a_pause_takes_no_share_from_what_ends_in_it(folder: Path) -> None:
    def drained(*, another: bool) -> int:
        engine = pipeline(folder, 60)
        asked = ask(engine, 12, greedy(30, pool="a", pool_share=0.2))
        for _ in range(3):
            engine.step()
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if another:
            engine.add("late", [7] * 6, greedy(30, pool="b", pool_share=0.2))
        steps = 0
        while engine.scheduler.get_num_unfinished_requests():
            engine.step()
            steps += 1
        assert_right(engine, asked, 30)
        assert not engine.tokens.get("late")
        return steps

    assert drained(another=True) == drained(another=False)


def test_a_preempted_thread_is_unfinished_before_it_is_in_line(folder: Path) -> None:
    engine = pipeline(folder, 20)
    prompt = prompts(8)["r7"]
    engine.add("r", prompt, greedy(60))
    scheduler = engine.scheduler
    step_until(engine, lambda: scheduler.running)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not scheduler.running
    assert scheduler.get_num_unfinished_requests() == 1
    step_until(engine, lambda: not engine.busy())
    assert engine.tokens["r"] == engine.expected(prompt, max_tokens=60).token_ids
    engine.assert_empty()


def test_a_whole_block_that_two_threads_hold_stays_vllms_to_register(folder: Path) -> None:
    """With two pipeline stages a child may come by its parent's block before the parent has registered it, and be
    preempted at once."""
    for seed in range(8):
        engine = Pipeline(folder, num_blocks=16, max_model_len=60, seed=seed, asynchronous=True)
        engine.depth = 3
        scheduler = engine.scheduler
        registered, admit = scheduler._update_after_schedule, scheduler._admit

        def later(output: Any, scheduler: Any = scheduler, registered: Any = registered) -> None:
            registered(output)
            for name in output.num_scheduled_tokens:
                scheduler.requests[name].next_decode_eligible_step = scheduler.current_step + 2

        def preempting(scheduler: Any = scheduler, admit: Any = admit) -> None:
            for request in list(scheduler.running):
                thread = scheduler._threads.get(request.request_id)
                begun = thread.started_step == scheduler._scheduling_step - 1 and not request.num_preemptions
                if thread.parent is not None and begun and thread.shared % 4 == 0 and len(scheduler.running) > 1:
                    scheduler.running.remove(request)
                    scheduler._preempt_request(request, time.monotonic())
                    scheduler._take_waiting()
            admit()

        scheduler._update_after_schedule, scheduler._admit = later, preempting
        asked = ask(engine, 30, greedy(60))
        assert_ends_right(engine, asked, 60)


def test_what_the_next_to_resume_left_is_reused_last(folder: Path) -> None:
    engine = pipeline(folder, 14, limits=ForkLimits(max_width=4))
    asked = ask(engine, 12, greedy(60))
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
    assert_ends_right(engine, asked, 60)


def test_an_answer_that_ends_leaves_no_thread_in_line(folder: Path) -> None:
    """The line counts the children that have never run, and must not lose count when they are dropped unrun."""
    engine = pipeline(folder, 12)
    ask(engine, 20, greedy(12))
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
