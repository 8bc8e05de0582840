"""Batched teacher forcing against one token at a time."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar.errors import InputError
from apar.evaluation.likelihood import Forced, Scorer, batches


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    from tiny_models import make_tiny_model

    return Scorer.load(make_tiny_model(tmp_path_factory.mktemp("likelihood") / "tiny"), "float32")


def sequences() -> list[Forced]:
    from tiny_models import random_prompts

    random = Random(5)
    prompts, answers = random_prompts(9, seed=1), random_prompts(9, seed=2, min_tokens=0, max_tokens=60)
    random.shuffle(answers)
    return [Forced(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def one_at_a_time(model: Any, prompt: list[int], answer: list[int]) -> float:
    """The chain rule spelled out: a forward pass of its own for each token."""
    import torch

    total = 0.0
    for place, token in enumerate(answer):
        with torch.inference_mode():
            logits_v = model(input_ids=torch.tensor([prompt + answer[:place]])).logits[0, -1]
        total += float(logits_v.double().log_softmax(-1)[token])
    return total


def test_batches_of_padded_rows_give_the_chain_rules_sums(scorer: Scorer) -> None:
    asked = [*sequences(), Forced([7, 8, 9], [])]
    seen: list[int] = []
    found = scorer.score(asked, batch_tokens=150, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(asked)
    for (prompt, answer), likelihood in zip(asked, found, strict=True):
        assert likelihood.num_tokens == len(answer)
        assert likelihood.log_likelihood == pytest.approx(one_at_a_time(scorer._model, prompt, answer), abs=1e-3)


def test_the_batching_makes_no_difference(scorer: Scorer) -> None:
    alone, together = scorer.score(sequences(), batch_tokens=1), scorer.score(sequences(), batch_tokens=10_000)
    for one, other in zip(alone, together, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-3)


def test_what_lies_over_the_models_longest_sequence_is_left_out(scorer: Scorer) -> None:
    assert scorer.max_tokens == 512
    (likelihood,) = scorer.score([Forced([7] * 500, [8] * 50)])
    assert likelihood.num_tokens == 12


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded"):
        Scorer.load(tmp_path)


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 60))
def test_batches_hold_every_sequence_once_and_stay_in_bounds(lengths: list[int], most: int) -> None:
    found = batches(lengths, most)
    assert sorted(index for batch in found for index in batch) == [i for i, length in enumerate(lengths) if length]
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most
