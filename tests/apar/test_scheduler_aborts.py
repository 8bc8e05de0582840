"""Requests that fork are aborted at every stage of their lives, and the prefix cache is reset under them."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import Engine, greedy
from pipeline import Pipeline
from tiny_models import random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

PROMPTS = random_prompts(16, seed=1)
M = 150


def state_of(running: Engine, name: str) -> tuple[bool, list[str]]:
    """Whether the root thread has ended, and the status of each child that has not."""
    root = running.internal[name]
    requests = running.scheduler.requests
    children = [str(request.status.name) for key, request in requests.items() if key.startswith(f"{root}#")]
    return root not in requests, children


STAGES: dict[str, Callable[[bool, list[str]], bool]] = {
    "before it starts": lambda ended, children: True,
    "while a child waits": lambda ended, children: "WAITING" in children,
    "while children run": lambda ended, children: "RUNNING" in children,
    "after the root thread ended": lambda ended, children: ended and bool(children),
}


@pytest.mark.parametrize(("stage", "max_width"), zip(STAGES, [32, 2, 32, 2], strict=True))
def test_an_abort_leaves_the_others_right_and_nothing_behind(running: Engine, stage: str, max_width: int) -> None:
    names = [running.add(prompt, greedy(M, {"max_width": max_width})) for prompt in PROMPTS]
    aborted: set[str] = set()
    last: dict[str, Any] = {}
    for _ in range(3000):
        for name in names:
            in_time = name not in aborted and name not in last and len(aborted) < len(names) // 2
            if in_time and STAGES[stage](*state_of(running, name)):
                running.llm.abort_request([name])
                aborted.add(name)
        if not running.llm.has_unfinished_requests():
            break
        last.update({output.request_id: output for output in running.step() if output.finished})
    running.finish()
    assert aborted
    assert set(last) == set(names) - aborted
    for prompt, name in zip(PROMPTS, names, strict=True):
        if name in last:
            running.assert_expected(prompt, last[name], max_tokens=M)


@pytest.mark.parametrize("first", [0, 20])
def test_aborts_at_any_step(running: Engine, first: int) -> None:
    names = [running.add(prompt, greedy(M)) for prompt in PROMPTS]
    last: dict[str, Any] = {}
    aborted: set[str] = set()
    for step in range(200):
        if step >= first and step % 3 == 0 and len(aborted) < 12:
            running.llm.abort_request([names[len(aborted)]])
            aborted.add(names[len(aborted)])
        last.update({output.request_id: output for output in running.step() if output.finished})
    last.update(running.finish())
    for prompt, name in zip(PROMPTS, names, strict=True):
        if name in last:
            running.assert_expected(prompt, last[name], max_tokens=M)


def test_all_requests_aborted_at_once_leave_an_idle_engine(running: Engine) -> None:
    from vllm.v1.request import RequestStatus

    for steps in (1, 5, 20, 40):
        for prompt in PROMPTS:
            running.add(prompt, greedy(M))
        for _ in range(steps):
            running.step()
        unfinished = set(running.internal.values()) - set(running.watch.finished)
        ended = running.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert {request.request_id for request in ended} == unfinished
        running.llm.abort_request(list(running.internal))
        running.finish()
        running.assert_empty()
        running.internal.clear()
        running.watch.clear()


def test_a_reset_of_the_prefix_cache_in_the_middle_changes_no_token(running: Engine) -> None:
    names = [running.add(prompt, greedy(M)) for prompt in PROMPTS]
    last: dict[str, Any] = {}
    for step in range(60):
        last.update({output.request_id: output for output in running.step() if output.finished})
        if step % 7 == 6:
            assert running.scheduler.reset_prefix_cache(reset_running_requests=True)
    last.update(running.finish())
    for prompt, name in zip(PROMPTS, names, strict=True):
        running.assert_expected(prompt, last[name], max_tokens=M)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_every_end_the_front_end_is_told_once_it_asks_for_ends(tiny_folder: Path, asynchronous: bool) -> None:
    """The load balancer of data parallelism counts what is in flight by this set."""
    pipeline = Pipeline(
        tiny_folder, num_blocks=200, max_model_len=64, seed=3, asynchronous=asynchronous, include_finished_set=True
    )
    random = Random(3)
    names = [f"r{i}" for i in range(8)]
    for name in names:
        pipeline.add(name, [random.randrange(5, 24) for _ in range(5)], greedy(60))
    aborted: set[str] = set()
    num_forked = 0
    while pipeline.busy():
        pipeline.step()
        for name in sorted(set(names[::2]) - aborted - pipeline.ends.keys()):
            group = pipeline.scheduler._groups.get(name)
            if group is not None and len(group.threads) > 1:
                pipeline.abort(name)
                aborted.add(name)
                num_forked += 1
    assert num_forked > 1
    pipeline.assert_empty()
    pipeline.scheduler.schedule()
    told = pipeline.scheduler.finished_req_ids_dict
    assert pipeline.finished | {name for names in told.values() for name in names} == set(names)
