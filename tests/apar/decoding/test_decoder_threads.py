"""Threads that run side by side give the sequential reference's answers, wherever they end and whatever is drafted."""

from typing import Any

import pytest
from decoding_support import CONTROL, Guessing, decoder
from tiny_models import CHILD, EOS, FLOAT32_ERROR, FORK, MAX_MODEL_LEN, VOCAB_SIZE, GapRecorder, random_prompts

from apar.decoding import DecodingError, DecodingResult, SamplingOptions, TreeModel
from apar.decoding.drafting import NoDrafting
from apar.options import ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult

PROMPTS = random_prompts(12, seed=4)
DRAFTING = {"plain": NoDrafting, "guessing": Guessing}


def expected(model: TreeModel, prompt: list[int], max_model_len: int = MAX_MODEL_LEN, **options: Any) -> Any:
    """The sequential answer; None where float32's error may decide."""
    limits = ForkLimits(**{name: options.pop(name) for name in ("max_forks", "max_depth") if name in options})
    gaps, control = GapRecorder(), options.pop("control", CONTROL)
    eos = [] if options.pop("ignore_eos", False) else [EOS]
    reference = ReferenceDecoder(model.hf, control, limits, eos, max_model_len, gaps)
    answer = reference.decode(prompt, **options)
    return None if gaps.smallest_gap < FLOAT32_ERROR else answer


def assert_same(got: DecodingResult, want: ReferenceResult) -> None:
    assert got.token_ids == want.token_ids
    assert (got.finish_reason, got.stop_token_id) == (want.finish_reason, want.stop_token_id)
    # Threads are numbered as they start here, in restored order there.
    assert [(n.node, n.parent, n.kind, n.start, n.end) for n in got.nodes] == [
        (n.node, n.parent, n.kind, n.start, n.end) for n in want.nodes
    ]
    paths = {thread.address: thread.path for thread in got.threads}
    for thread in want.threads[:-1]:  # behind a cut the last one may have gone on
        assert paths[thread.address][: len(thread.path)] == thread.path


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("max_tokens", [1, 7, 50, 300])
def test_answers_are_the_references(tree_model: TreeModel, drafting: str, max_tokens: int) -> None:
    compared = forked = accepted = 0
    for prompt in PROMPTS:
        got = decoder(tree_model, DRAFTING[drafting]()).decode(prompt, max_tokens=max_tokens)
        want = expected(tree_model, prompt, max_tokens=max_tokens)
        if want is not None:
            assert_same(got, want)
            compared, forked = compared + 1, forked + (got.num_forks > 0)
            accepted += got.drafting.accepted
    assert compared >= 9
    if max_tokens == 300:
        assert forked >= 4
        assert (accepted > 0) == (drafting == "guessing")


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize(
    "options",
    [
        {"max_forks": 2},
        {"max_forks": 0},
        {"max_depth": 1},
        {"max_model_len": 60},
        {"stop_token_ids": [30, 31, 32, 33, 34]},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_limits_end_an_answer_where_the_reference_ends(
    tree_model: TreeModel, drafting: str, options: dict[str, Any]
) -> None:
    limits = {name: value for name, value in options.items() if name.startswith("max_")}
    others = {name: value for name, value in options.items() if name not in limits}
    compared = 0
    for prompt in PROMPTS:
        got = decoder(tree_model, DRAFTING[drafting](), **limits).decode(prompt, max_tokens=120, **others)
        want = expected(tree_model, prompt, max_tokens=120, **options)
        if want is not None:
            assert_same(got, want)
            compared += 1
    assert compared >= 9


@pytest.mark.parametrize("max_width", [1, 2])
def test_width_changes_the_number_of_forwards_and_nothing_else(tree_model: TreeModel, max_width: int) -> None:
    for prompt in PROMPTS[:6]:
        wide = decoder(tree_model).decode(prompt, max_tokens=200)
        narrow = decoder(tree_model, max_width=max_width).decode(prompt, max_tokens=200)
        assert narrow.token_ids == wide.token_ids
        assert narrow.stats["max_width"] <= max_width
        assert narrow.drafting.forwards >= wide.drafting.forwards
        assert all(len(forward) <= max_width for forward in narrow.trace)


def test_a_decoder_that_does_not_fork_bans_both_control_tokens(tree_model: TreeModel) -> None:
    for prompt in PROMPTS[:6]:
        got = decoder(tree_model, forks=False).decode(prompt, max_tokens=200)
        want = expected(tree_model, prompt, max_tokens=200, fork=False)
        assert len(got.threads) == 1
        assert not {FORK, CHILD} & set(got.token_ids)
        if want is not None:
            assert got.token_ids == want.token_ids


def test_tokens_come_out_in_order_step_by_step(tree_model: TreeModel) -> None:
    run = decoder(tree_model, Guessing()).start(PROMPTS[0], max_tokens=300)
    seen: list[int] = []
    while run.step():
        assert run.token_ids[: len(seen)] == seen
        assert run.result().token_ids == run.token_ids
        seen = list(run.token_ids)
    assert run.step() is False
    assert run.result().token_ids[: len(seen)] == seen


@pytest.mark.parametrize("forks", [True, False])
def test_an_answer_gives_all_its_slots_back(tree_model: TreeModel, forks: bool) -> None:
    for prompt in PROMPTS[:6]:
        run = decoder(tree_model, Guessing(), forks=forks, max_width=3).start(prompt, max_tokens=100)
        while run.step():
            held = {slot for thread in run._answer.threads for slot in thread.slots}
            assert run._cache.pool.num_used == len(held)
        assert run._cache.pool.num_used == 0


def test_a_seed_repeats_a_sampled_answer(tree_model: TreeModel) -> None:
    def sampled(seed: int | None) -> list[int]:
        options = SamplingOptions(temperature=1.0, top_p=0.95, seed=seed)
        return decoder(tree_model, Guessing()).decode(PROMPTS[1], max_tokens=80, sampling=options).token_ids

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)
    # Without one, answers differ; some end at once, and two of those are the same.
    assert len({tuple(sampled(None)) for _ in range(12)}) > 1


def test_child_is_never_sampled(tree_model: TreeModel) -> None:
    for seed in range(4):
        options = SamplingOptions(temperature=3.0, seed=seed)
        got = decoder(tree_model, Guessing(), max_depth=1).decode(PROMPTS[2], max_tokens=150, sampling=options)
        for thread in got.threads:
            written = thread.path[len(PROMPTS[2]) :]
            assert written.count(CHILD) == len(thread.address)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 10, "the prompt has 0 tokens: use 1 to 511"),
        ([5] * MAX_MODEL_LEN, 10, "the prompt has 512 tokens: use 1 to 511"),
        ([5, VOCAB_SIZE], 10, f"the prompt has token {VOCAB_SIZE}: the vocabulary is 0 to {VOCAB_SIZE - 1}"),
        ([5, 6], 0, "max_tokens is 0: use at least 1"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    tree_model: TreeModel, prompt: list[int], max_tokens: int, says: str
) -> None:
    with pytest.raises(DecodingError, match=says):
        decoder(tree_model).decode(prompt, max_tokens=max_tokens)


def test_forking_needs_control_tokens(tree_model: TreeModel) -> None:
    with pytest.raises(DecodingError, match="no control tokens, so it cannot fork"):
        decoder(tree_model, control=None)


def test_a_length_beyond_the_models_is_refused(tree_model: TreeModel) -> None:
    with pytest.raises(DecodingError, match="max_model_len is 513: use 2 to 512"):
        decoder(tree_model, max_model_len=MAX_MODEL_LEN + 1)
