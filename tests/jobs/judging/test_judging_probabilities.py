"""Probabilities of verdicts, read from tokens as the export has them."""

import math

import pytest

from jobs.judging.probabilities import can_tell, probabilities
from jobs.judging.verdicts import pair_form, score_form


def token(text: str, **top: float) -> dict[str, object]:
    likeliest = [{"token": name, "logprob": math.log(value)} for name, value in (top or {text: 1.0}).items()]
    return {"token": text, "logprob": 0.0, "top": likeliest}


def spaced(text: str, top: dict[str, float]) -> dict[str, object]:
    return {"token": text, "logprob": 0.0, "top": [{"token": k, "logprob": math.log(v)} for k, v in top.items()]}


END = token("<|im_end|>")


def test_the_expected_score_is_the_mean_over_the_scores_probabilities() -> None:
    told = probabilities([spaced("4", {"4": 0.5, "5": 0.25, "1": 0.25}), END], "4", score_form(1, 5))
    assert told is not None
    assert told.of == pytest.approx({"1": 0.25, "2": 0.0, "3": 0.0, "4": 0.5, "5": 0.25})
    assert told.expected == pytest.approx(0.25 * 1 + 0.5 * 4 + 0.25 * 5)
    assert told.mass == pytest.approx(1.0)


def test_tokens_that_begin_no_label_are_left_out_and_the_rest_is_scaled() -> None:
    told = probabilities([spaced("2", {"2": 0.3, " 2": 0.1, "The": 0.5, "1": 0.1})], "2", score_form(1, 5))
    assert told is not None
    assert told.mass == pytest.approx(0.5)
    assert told.of["2"] == pytest.approx(0.8)
    assert told.of["1"] == pytest.approx(0.2)


def test_with_reasons_the_place_is_that_of_the_last_label_and_not_of_one_in_the_reason() -> None:
    tokens = [token("Reason"), token(":"), spaced(" 5", {" 5": 1.0}), token("\n"), token("Score"), token(":"),
              spaced(" 2", {" 2": 0.75, " 3": 0.25}), END]  # fmt: skip
    told = probabilities(tokens, "2", score_form(1, 5, reasons=True))
    assert told is not None
    assert told.expected == pytest.approx(2.25)


def test_a_label_of_several_tokens_is_known_by_its_first_one() -> None:
    told = probabilities([spaced("t", {"t": 0.5, "A": 0.5}), token("ie"), END], "tie", pair_form())
    assert told is not None
    assert told.of == pytest.approx({"A": 0.5, "B": 0.0, "tie": 0.5})


def test_without_tokens_or_their_place_nothing_is_said() -> None:
    assert probabilities(None, "4", score_form(1, 5)) is None
    assert probabilities([], "4", score_form(1, 5)) is None
    assert probabilities([token("x"), END], "4", score_form(1, 5)) is None
    assert probabilities([spaced("4", {"no": 1.0})], "4", score_form(1, 5)) is None


def test_a_scale_where_one_score_begins_another_cannot_be_told_apart() -> None:
    assert can_tell(score_form(1, 5))
    assert can_tell(score_form(0, 9))
    assert can_tell(pair_form())
    assert not can_tell(score_form(1, 10))
    assert probabilities([spaced("1", {"1": 1.0}), END], "1", score_form(1, 10)) is None
