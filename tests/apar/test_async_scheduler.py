"""Scheduling a step before the one before it is done, and steps of several tokens: vLLM's own pipeline, real weights.

On CPU vLLM switches asynchronous scheduling off, although only CUDA streams and events stand in its way. With those
replaced by placeholders the whole pipeline runs here: `EngineCore.step_with_batch_queue`, `AsyncScheduler`, and sampled
tokens that the next step takes from the model runner. The CPU computes each step at once: the order of the calls is the
real one, and only the overlap in time is missing.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import ROOMY, TIGHT, Engine, assert_as_expected, greedy_params, run_with_aborts, started, total
from serving import LIMITS, ROOT, Reference, engine_environment
from tiny_models import make_tiny_model, random_prompts

from apar.options import ForkLimits

pytestmark = pytest.mark.engine


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("async") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@contextlib.contextmanager
def asynchronous_on_cpu() -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_keep))
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        yield


@pytest.fixture(scope="module", params=[ROOMY, TIGHT], ids=["roomy", "tight"])
def engine(request: pytest.FixtureRequest, folder: Path, reference: Reference) -> Iterator[Engine]:
    with asynchronous_on_cpu(), started(folder, reference, request.param, async_scheduling=True) as engine:
        assert type(engine.scheduler).__name__ == "AsyncForkingScheduler"
        assert engine.core.step_fn == engine.core.step_with_batch_queue
        assert engine.core.batch_queue_size == 2
        yield engine


# --- asynchronous scheduling ---


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 400])
def test_asynchronous_answers_equal_the_reference(engine: Engine, max_tokens: int) -> None:
    prompts = random_prompts(24, seed=1)
    outputs = engine.generate(prompts, greedy_params(max_tokens))
    assert_as_expected(engine, prompts, outputs, max_tokens=max_tokens)
    if max_tokens == 400:
        assert total(outputs, "forks") > 24
        # Outputs of preempted threads that are still under way when they lose their blocks are what may go wrong.
        assert (total(outputs, "preemptions") > 3) == (engine.num_blocks == TIGHT)
    engine.assert_empty()


def test_a_stop_token_cuts_asynchronous_answers(engine: Engine) -> None:
    prompts = random_prompts(16, seed=2)
    stops = list(range(20, 60, 4))
    outputs = engine.generate(prompts, greedy_params(200, stop_token_ids=stops))
    assert_as_expected(engine, prompts, outputs, max_tokens=200, stop_token_ids=stops)
    assert any(output.outputs[0].stop_reason in stops for output in outputs)
    engine.assert_empty()


def test_a_stop_string_cuts_asynchronous_answers(engine: Engine) -> None:
    prompts = random_prompts(12, seed=1)
    plain = [output.outputs[0].text for output in engine.generate(prompts, greedy_params(200))]
    stop = plain[2][50:53]
    outputs = engine.generate(prompts, greedy_params(200, stop=[stop]))
    assert [output.outputs[0].text for output in outputs] == [text.partition(stop)[0] for text in plain]
    engine.llm.llm_engine.step()  # lets the engine take note of what the front end has ended
    while engine.core.scheduler.has_requests() or engine.core.batch_queue:
        engine.llm.llm_engine.step()
    engine.assert_empty()


def test_the_most_forks_and_the_greatest_depth_cut_asynchronous_answers(engine: Engine) -> None:
    prompts = random_prompts(16, seed=3)
    for most in ({"max_forks": 1}, {"max_depth": 1}, {"max_forks": 0}, {"max_width": 1}):
        outputs = engine.generate(prompts, greedy_params(200, extra_args={"apar": most}))
        limits = LIMITS if "max_width" in most else ForkLimits(**most)
        assert_as_expected(engine, prompts, outputs, max_tokens=200, limits=limits)
    engine.assert_empty()


def test_an_asynchronous_request_that_may_not_fork_does_not(engine: Engine) -> None:
    prompts = random_prompts(16, seed=1)
    outputs = engine.generate(prompts, greedy_params(100, extra_args={"apar": False}))
    assert_as_expected(engine, prompts, outputs, max_tokens=100, fork=False)


@pytest.mark.parametrize("seed", range(4))
def test_aborts_leave_the_others_right_and_nothing_behind(engine: Engine, seed: int) -> None:
    run_with_aborts(engine, seed)


def test_asynchronous_seeds_do_not_depend_on_neighbours(engine: Engine) -> None:
    from vllm import SamplingParams

    prompts = random_prompts(10, seed=4)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=80) for i in range(10)]
    together = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]
    for i in (0, 3, 7):
        alone = engine.generate([prompts[i]], params[i])
        assert list(alone[0].outputs[0].token_ids) == together[i]


# --- several tokens in one step ---


def test_speculative_answers_equal_the_reference() -> None:
    """`speculating.py`, in a process of its own."""
    file = str(Path(__file__).with_name("speculating.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", file],
        env=engine_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
