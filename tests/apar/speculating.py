"""Steps of several tokens on the real engine: n-gram speculation, greedy answers as the reference's.

Not collected by itself: `test_async_scheduler.py` runs it in a process of its own. The drafter
imports llvmlite, after which vLLM 0.32 cannot start another engine in the same process: it looks through all modules'
globals and trips over one of llvmlite's.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import TIGHT, Engine, assert_as_expected, greedy_params, run_with_aborts, started, total
from serving import Reference
from tiny_models import make_tiny_model, random_prompts

from apar.options import ForkLimits

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("speculating") / "tiny")
    with started(folder, Reference(folder), TIGHT, speculative_config=NGRAM) as engine:
        assert type(engine.scheduler).__name__ == "SyncForkingScheduler"
        yield engine


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 400])
def test_speculative_answers_equal_the_reference(speculating: Engine, max_tokens: int) -> None:
    prompts = random_prompts(24, seed=1)
    outputs = speculating.generate(prompts, greedy_params(max_tokens))
    assert_as_expected(speculating, prompts, outputs, max_tokens=max_tokens)
    assert total(outputs, "preemptions") > 3 or max_tokens < 60
    speculating.assert_empty()


def test_a_speculative_answer_with_room_enough_equals_the_reference(speculating: Engine) -> None:
    for prompt in random_prompts(8, seed=1):
        outputs = speculating.generate([prompt], greedy_params(100))
        assert_as_expected(speculating, [prompt], outputs, max_tokens=100)
        assert total(outputs, "preemptions") == 0


def test_drafts_are_taken(speculating: Engine) -> None:
    """Else the tests around this one would not see several tokens in one step."""
    num_tokens = num_steps = 0
    for prompt in random_prompts(24, seed=1):
        outputs = speculating.generate([prompt], greedy_params(400, extra_args={"apar": False}))
        num_tokens += len(outputs[0].outputs[0].token_ids)
        num_steps += total(outputs, "steps")
    assert num_steps < 0.95 * num_tokens


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
