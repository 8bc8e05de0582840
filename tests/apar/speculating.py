"""Steps of several tokens on the real engine: n-gram speculation, greedy answers as the reference's.

Not collected by itself: `test_async_scheduler.py` runs it in a process of its own, once per KV budget. The drafter
imports llvmlite, after which vLLM 0.32 cannot start another engine in the same process: it looks through all modules'
globals and trips over one of llvmlite's.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import Engine, assert_as_expected, greedy_params, run_with_aborts, started
from serving import Reference
from tiny_models import make_tiny_model, random_prompts

from apar.options import ForkLimits

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("speculating") / "tiny")
    num_blocks = int(os.environ["FORQ_TEST_BLOCKS"])
    with started(folder, Reference(folder), num_blocks, speculative_config=NGRAM) as engine:
        assert type(engine.scheduler).__name__ == "SyncForkingScheduler"
        yield engine


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 400])
def test_speculative_answers_equal_the_reference(speculating: Engine, max_tokens: int) -> None:
    prompts = random_prompts(24, seed=1)
    outputs = speculating.generate(prompts, greedy_params(max_tokens))
    assert_as_expected(speculating, prompts, outputs, max_tokens=max_tokens)
    speculating.assert_empty()


def test_drafts_are_taken(speculating: Engine) -> None:
    """Else the tests around this one would not see several tokens in one step."""
    for prompt in random_prompts(24, seed=1):
        answer = speculating.expected(prompt, max_tokens=400, fork=False)
        if len(answer.token_ids) > 100:
            params = greedy_params(400, extra_args={"apar": False})
            output = speculating.generate([prompt], params)[0]
            assert output.kv_transfer_params["apar"]["stats"]["steps"] < 0.9 * len(answer.token_ids)
            return
    raise AssertionError("no long answer")


def test_a_stop_token_cuts_speculative_answers(speculating: Engine) -> None:
    prompts = random_prompts(16, seed=2)
    stops = list(range(20, 60, 4))
    outputs = speculating.generate(prompts, greedy_params(200, stop_token_ids=stops))
    assert_as_expected(speculating, prompts, outputs, max_tokens=200, stop_token_ids=stops)
    for most in ({"max_forks": 1}, {"max_depth": 1}, {"max_forks": 0}):
        outputs = speculating.generate(prompts, greedy_params(200, extra_args={"apar": most}))
        assert_as_expected(speculating, prompts, outputs, max_tokens=200, limits=ForkLimits(**most))
    speculating.assert_empty()


@pytest.mark.parametrize("seed", range(2))
def test_aborts_among_speculative_answers(speculating: Engine, seed: int) -> None:
    run_with_aborts(speculating, seed)
