"""Tokens are the sequential reference decoder's, whatever room there is and whoever shares it."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import ROOMY, TIGHT, Engine, Reference, engine, greedy, receipt, stats
from tiny_models import CHILD, FIRST_PLAIN, FORK, MAX_MODEL_LEN, VOCAB_SIZE, make_tiny_model, random_prompts

from apar.options import ForkLimits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

PROMPTS = random_prompts(16, seed=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": ROOMY},
    "tight": {"num_blocks": TIGHT},
    "chunked": {"num_blocks": ROOMY, "max_num_batched_tokens": 40, "max_num_seqs": 32},
    "tight and chunked": {"num_blocks": TIGHT, "max_num_batched_tokens": 40, "max_num_seqs": 32},
    "tight, no prefix cache": {"num_blocks": TIGHT, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=SETTINGS)
def shared(
    request: pytest.FixtureRequest, in_process: None, tiny_folder: Path, tiny_reference: Reference
) -> Iterator[Engine]:
    with engine(tiny_folder, reference=tiny_reference, **SETTINGS[request.param]) as started:
        yield started


def assert_all_expected(running: Engine, prompts: list[list[int]], outputs: list[Any], **options: Any) -> None:
    sure = [running.assert_expected(p, o, **options) for p, o in zip(prompts, outputs, strict=True)]
    assert sum(sure) > 0.8 * len(sure), "the reference is not sure enough to compare with"


@pytest.mark.parametrize("max_tokens", [1, 2, 30, 400])
def test_greedy_answers_are_those_of_the_reference(running: Engine, max_tokens: int) -> None:
    outputs = running.run(PROMPTS, greedy(max_tokens))
    assert_all_expected(running, PROMPTS, outputs, max_tokens=max_tokens)
    if max_tokens == 400:
        assert sum(stats(output)["forks"] for output in outputs) > 20
        preempted = sum(stats(output)["preemptions"] for output in outputs)
        assert preempted > 0 if running.num_blocks == TIGHT else preempted == 0


def test_an_answer_alone_is_the_answer_in_a_batch(running: Engine) -> None:
    for prompt in PROMPTS[:3]:
        assert_all_expected(running, [prompt], running.run([prompt], greedy(100)), max_tokens=100)


@pytest.mark.parametrize("max_width", [1, 3])
def test_no_more_threads_of_a_request_run_at_once_than_it_allows(running: Engine, max_width: int) -> None:
    widest = 0

    def look(scheduler: Any) -> None:
        nonlocal widest
        counts: dict[str, int] = {}
        for request in scheduler.running:
            root = request.request_id.split("#")[0]
            counts[root] = counts.get(root, 0) + 1
        widest = max([widest, *counts.values()])

    running.watch.on_step = look
    outputs = running.run(PROMPTS, greedy(200, {"max_width": max_width}))
    assert_all_expected(running, PROMPTS, outputs, max_tokens=200)
    assert max(stats(output)["max_width"] for output in outputs) == widest <= max_width


@pytest.mark.parametrize("max_forks", [0, 1, 4])
def test_the_fork_too_many_in_restored_order_ends_an_answer(running: Engine, max_forks: int) -> None:
    outputs = running.run(PROMPTS, greedy(200, {"max_forks": max_forks}))
    limits = ForkLimits(max_forks=max_forks)
    assert_all_expected(running, PROMPTS, outputs, max_tokens=200, limits=limits)


@pytest.mark.parametrize("max_depth", [0, 1])
def test_a_thread_at_the_greatest_depth_does_not_fork(running: Engine, max_depth: int) -> None:
    outputs = running.run(PROMPTS, greedy(120, {"max_depth": max_depth}))
    assert_all_expected(running, PROMPTS, outputs, max_tokens=120, limits=ForkLimits(max_depth=max_depth))


def test_with_eos_ignored_every_thread_goes_on_to_the_end(running: Engine) -> None:
    outputs = running.run(PROMPTS[:8], greedy(60, ignore_eos=True))
    assert_all_expected(running, PROMPTS[:8], outputs, max_tokens=60, ignore_eos=True)


def test_prompts_near_the_longest_path_are_cut_where_it_ends(running: Engine) -> None:
    random = Random(5)
    lengths = [MAX_MODEL_LEN - left for left in (*range(1, 9), 12, 20, 33, 40, 50, 64)]
    prompts = [[random.randrange(FIRST_PLAIN, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    outputs = running.run(prompts, greedy(400))
    assert_all_expected(running, prompts, outputs, max_tokens=400)


def test_requests_of_every_kind_side_by_side(running: Engine) -> None:
    random = Random(7)
    prompts, params, options = random_prompts(30, seed=9), [], []
    for _ in prompts:
        max_tokens, width = random.choice([3, 30, 90, 300]), random.choice([1, 2, 4, 32])
        limits = ForkLimits(max_forks=random.choice([1, 3, 64]), max_depth=random.choice([1, 2]))
        stop = random.sample(range(FIRST_PLAIN, VOCAB_SIZE), random.choice([0, 0, 1, 3]))
        apar = {"max_width": width, "max_forks": limits.max_forks, "max_depth": limits.max_depth}
        params.append(greedy(max_tokens, apar, stop_token_ids=stop))
        options.append({"max_tokens": max_tokens, "limits": limits, "stop_token_ids": tuple(sorted(stop))})
    outputs = running.run(prompts, params)
    for prompt, output, own in zip(prompts, outputs, options, strict=True):
        running.assert_expected(prompt, output, **own)


@pytest.mark.parametrize("num_blocks", [ROOMY, TIGHT])
def test_a_model_that_forks_at_every_turn_gives_the_references_answers(
    forky_folder: Path, forky_reference: Reference, num_blocks: int
) -> None:
    prompts = random_prompts(8, seed=2)
    limits = ForkLimits(max_depth=3)
    with engine(forky_folder, num_blocks, forky_reference) as running:
        outputs = running.run(prompts, greedy(200))
        assert_all_expected(running, prompts, outputs, max_tokens=200, limits=limits)
        assert max(len(receipt(output)["nodes"]) for output in outputs) > 20
        running.assert_empty()


# --- Requests that do not fork, beside stock vLLM ---


def plain_folder(tmp_path: Path) -> Path:
    """The tiny model without a word about forking."""
    import json

    folder = make_tiny_model(tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    del config["apar"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_does_not_fork_is_what_stock_vllm_says(tmp_path: Path, tiny_folder: Path) -> None:
    """Stock vLLM with room for everything; ours without, so that preemption changes no word, either."""
    plain = plain_folder(tmp_path)
    both = [token for token in range(VOCAB_SIZE) if token not in (FORK, CHILD)]
    no_child = [token for token in range(VOCAB_SIZE) if token != CHILD]
    with engine(plain, ROOMY, scheduler=None) as stock:
        unforked = stock.run(PROMPTS, greedy(120, allowed_token_ids=both))
        never = stock.run(PROMPTS, greedy(120, allowed_token_ids=no_child))
        anything = stock.run(PROMPTS, greedy(120))
    with engine(plain, TIGHT) as without:
        same_words(without.run(PROMPTS, greedy(120)), anything)
        without.assert_empty()
    with engine(tiny_folder, TIGHT) as running:
        same_words(running.run(PROMPTS, greedy(120, False)), unforked)
        outputs = running.run(PROMPTS, greedy(120))
        alone = [i for i, output in enumerate(never) if FORK not in output.outputs[0].token_ids]
        assert len(alone) > 5
        same_words([outputs[i] for i in alone], [never[i] for i in alone])
        running.assert_empty()


def same_words(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        a, b = mine.outputs[0], other.outputs[0]
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert len(receipt(mine)["nodes"]) == 1
