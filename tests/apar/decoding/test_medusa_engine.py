"""vLLM's own Medusa proposer under the forking scheduler, with heads of ours: greedy answers as the reference's."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Watch
from fitted_heads import fitted_heads
from in_process import TIGHT, Engine, assert_as_expected, greedy_params, run_with_aborts, started, total
from serving import Reference
from tiny_models import make_tiny_model, random_prompts

from apar.decoding.medusa_heads import load_heads
from apar.options import ForkLimits

pytestmark = pytest.mark.engine

PROMPTS = random_prompts(24, seed=1)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("medusa")


@pytest.fixture(scope="module")
def reference(room: Path) -> Reference:
    return Reference(make_tiny_model(room / "tiny"))


@pytest.fixture(scope="module")
def heads(room: Path, reference: Reference) -> Path:
    return fitted_heads(room / "heads", reference.model, PROMPTS)


def speculating(room: Path, reference: Reference, heads: Path) -> contextlib.AbstractContextManager[Engine]:
    speculation = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 2}
    return started(room / "tiny", reference, TIGHT, speculative_config=speculation)


@pytest.fixture(scope="module")
def medusa(room: Path, reference: Reference, heads: Path) -> Iterator[Engine]:
    with speculating(room, reference, heads) as engine:
        assert type(engine.scheduler).__name__ == "SyncForkingScheduler"
        yield engine


def assert_same_heads(engine: Engine, folder: Path) -> None:
    """What vLLM computes is what our heads compute."""
    worker = engine.core.model_executor.driver_worker
    theirs = getattr(worker, "worker", worker).model_runner.drafter.model
    hidden_nd = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    ours = load_heads(folder)(hidden_nd)
    assert ours.std() > 0.1
    torch.testing.assert_close(torch.stack(theirs.compute_logits(theirs(hidden_nd))), ours)


def test_vllm_computes_what_our_heads_compute(medusa: Engine, heads: Path) -> None:
    assert_same_heads(medusa, heads)


@pytest.mark.parametrize("max_tokens", [1, 7, 60, 400])
def test_answers_with_medusa_equal_the_reference(medusa: Engine, max_tokens: int) -> None:
    outputs = medusa.generate(PROMPTS, greedy_params(max_tokens))
    assert_as_expected(medusa, PROMPTS, outputs, max_tokens=max_tokens)
    assert total(outputs, "preemptions") > 3 or max_tokens < 60
    medusa.assert_empty()


def test_drafts_are_taken_in_roots_and_in_details(medusa: Engine) -> None:
    """Else the tests around this one would not see several tokens in one step."""
    watch = Watch(medusa.scheduler)
    try:
        outputs = medusa.generate(PROMPTS, greedy_params(60))
    finally:
        for name in ("add_request", "schedule", "update_from_output"):
            delattr(medusa.scheduler, name)
    assert_as_expected(medusa, PROMPTS, outputs, max_tokens=60)
    threads = [name for step in watch.steps for name, tokens in step.sampled.items() if len(tokens) > 1]
    assert set(threads) & set(watch.roots)
    assert set(threads) - set(watch.roots)


def test_stop_tokens_and_limits_hold_among_drafts(medusa: Engine) -> None:
    prompts = random_prompts(16, seed=2)
    stops = list(range(20, 60, 4))
    outputs = medusa.generate(prompts, greedy_params(200, stop_token_ids=stops))
    assert_as_expected(medusa, prompts, outputs, max_tokens=200, stop_token_ids=stops)
    for most in ({"max_forks": 1}, {"max_depth": 1}, {"max_forks": 0}):
        outputs = medusa.generate(prompts, greedy_params(200, extra_args={"apar": most}))
        assert_as_expected(medusa, prompts, outputs, max_tokens=200, limits=ForkLimits(**most))
    medusa.assert_empty()


def test_aborts_among_drafts_leave_the_others_right(medusa: Engine) -> None:
    run_with_aborts(medusa, seed=0)


def test_a_released_folder_drafts_as_ours(room: Path, reference: Reference, heads: Path) -> None:
    """`medusa_lm_head.pt`, and a config that knows other names and no vocabulary."""
    released = room / "released"
    released.mkdir()
    torch.save(load_heads(heads).state_dict(), released / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "hidden_size": 64, "medusa_fc_bias": True}
    (released / "config.json").write_text(json.dumps(config))
    with speculating(room, reference, released) as engine:
        assert_same_heads(engine, heads)
        outputs = engine.generate(PROMPTS[:8], greedy_params(60))
        assert_as_expected(engine, PROMPTS[:8], outputs, max_tokens=60)
