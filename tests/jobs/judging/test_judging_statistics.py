"""Figures over verdicts, against tables worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.judging.statistics import first_place_share, kappa, mean_of, wins_of


def test_a_mean_of_two_values_has_the_interval_that_all_four_resamples_give() -> None:
    # Resamples of (1, 5): (1, 1), (1, 5), (5, 1), (5, 5), so means 1, 3, 3, 5: the interval reaches both ends.
    found = mean_of([1, 5], range(2), seed=0)
    assert (found.n, found.mean, found.low, found.high) == (2, 3.0, 1.0, 5.0)


def test_an_interval_of_scores_is_about_two_standard_errors_wide_on_each_side() -> None:
    # 50 ones and 50 fives: mean 3, standard deviation 2, standard error 0.2.
    found = mean_of([1] * 50 + [5] * 50, range(100), seed=7)
    assert found.mean == 3.0
    assert found.low == pytest.approx(3 - 1.96 * 0.2, abs=0.06)
    assert found.high == pytest.approx(3 + 1.96 * 0.2, abs=0.06)


def test_an_interval_is_over_questions_and_not_over_values() -> None:
    # Two questions, (1, 1, 1) and (5): resamples are both of one, both of the other, or each once: means 1, 5 and 2.
    found = mean_of([1, 1, 1, 5], ["p", "p", "p", "q"], seed=0)
    assert (found.n, found.questions, found.mean, found.low, found.high) == (4, 2, 2.0, 1.0, 5.0)
    # 25 questions of four equal values each: as sure as 25 values, not as 100. Standard error 2 / 5.
    found = mean_of([1, 1, 1, 1] * 12 + [5, 5, 5, 5] * 13, [n // 4 for n in range(100)], seed=7)
    assert found.low == pytest.approx(3.08 - 1.96 * 0.4, abs=0.13)
    assert found.high == pytest.approx(3.08 + 1.96 * 0.4, abs=0.13)
    assert mean_of([1, 5, 3], ["p", "p", "p"], seed=0).low is None


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [1, 2, 2, 3, 5, 5, 4, 1]
    assert mean_of(values, range(8), seed=3) == mean_of(values, range(8), seed=3)


def test_too_few_or_equal_values_have_no_width_instead_of_a_guess() -> None:
    assert mean_of([], [], seed=0) == mean_of([], [], seed=1)
    assert mean_of([], [], 0).mean is None
    assert (mean_of([4], "p", 0).mean, mean_of([4], "p", 0).low) == (4.0, None)
    assert mean_of([2, 2, 2], "pqr", 0).low == mean_of([2, 2, 2], "pqr", 0).high == 2.0


@given(st.lists(st.integers(0, 100), min_size=2, max_size=40), st.integers(0, 1000))
def test_an_interval_lies_between_the_smallest_and_the_largest_value_around_the_mean(
    values: list[int], seed: int
) -> None:
    found = mean_of(values, range(len(values)), seed)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert found.low is not None
    assert found.high is not None
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack


def test_a_tie_is_half_a_win() -> None:
    # 3 wins, 1 loss, 2 ties: (3 + 1) / 6.
    wins = wins_of(["a", "a", "tie", "b", "a", "tie"], range(6), seed=0)
    assert (wins.wins_a, wins.wins_b, wins.ties) == (3, 1, 2)
    assert wins.rate_a.mean == pytest.approx(4 / 6)
    assert wins_of([], [], 0).rate_a.mean is None


def test_position_bias_counts_decided_verdicts_only() -> None:
    assert first_place_share(["A", "A", "B", "tie", "A", "tie"]) == (4, 0.75)
    assert first_place_share(["tie"]) == (0, None)


def test_kappa_is_that_of_the_textbook_table() -> None:
    # Both yes 20, first yes only 5, second yes only 10, both no 15: po = 0.7, pe = 0.5 x 0.6 + 0.5 x 0.4 = 0.5.
    first = ["A"] * 25 + ["B"] * 25
    second = ["A"] * 20 + ["B"] * 5 + ["A"] * 10 + ["B"] * 15
    assert kappa(first, second, ["A", "B", "tie"], weighted=False) == pytest.approx((0.7 - 0.5) / (1 - 0.5))


def test_weighted_kappa_takes_the_square_of_the_distance() -> None:
    # Scores (1, 1), (2, 3), (3, 3): one disagreement of distance 1, weight 1/4 on a scale of three. Expected, over the
    # nine products of margins {1: 1/3, 2: 1/3, 3: 1/3} and {1: 1/3, 3: 2/3}, weights (i - j)^2 / 4:
    # 1/9 (0 + 2 x 1 + 1/4 + 2 x 1/4 + 1 + 0) = 1/9 x 3.75.
    expected = 3.75 / 9
    observed = 1 / 3 * 1 / 4
    assert kappa([1, 2, 3], [1, 3, 3], [1, 2, 3], weighted=True) == pytest.approx(1 - observed / expected)


def test_kappa_says_nothing_where_there_is_nothing_to_agree_on() -> None:
    assert kappa([], [], [1, 2], weighted=True) is None
    assert kappa([2, 2], [2, 2], [1, 2], weighted=True) is None
    assert kappa([1, 2, 1, 2], [1, 1, 2, 2], [1, 2], weighted=False) == 0.0
