"""Figures over verdicts: means with intervals, win rates, position bias, agreement. Nothing here knows of jobs.

Where there is nothing to divide by, or too little to say, a figure is None.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 2000
CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the interval that a bootstrap over the questions gives it (percentiles, 95 %)."""

    n: int
    questions: int
    mean: float | None
    low: float | None = None
    high: float | None = None


def mean_of(values: Sequence[float], questions: Sequence[Hashable], seed: int) -> Interval:
    """The mean with its interval; with fewer than 2 questions there is none, with equal values it has no width.

    Values of one question depend on each other (its difficulty, an answer that stands in several pairs), so a resample
    draws whole questions: the mean is then a ratio of two sums over them.

    Args:
        questions: what each value belongs to.
    """
    places: dict[Hashable, int] = {}
    cluster_of = [places.setdefault(question, len(places)) for question in questions]
    mean = plain_mean(values)
    if mean is None or len(places) < 2:
        return Interval(len(values), len(places), mean)
    if min(values) == max(values):
        return Interval(len(values), len(places), mean, mean, mean)
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.bincount(cluster_of, weights=values), np.bincount(cluster_of)),
        lambda sums, counts, axis: sums.sum(axis=axis) / counts.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, _DRAWS_AT_ONCE // len(places)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(len(values), len(places), mean, float(found.low), float(found.high))


def plain_mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Wins:
    """Of outcomes `a`, `b`, `tie`: their counts and A's win rate, a tie being half a win."""

    wins_a: int
    wins_b: int
    ties: int
    rate_a: Interval


def wins_of(outcomes: Sequence[str], questions: Sequence[Hashable], seed: int) -> Wins:
    counts = Counter(outcomes)
    points = [{"a": 1.0, "tie": 0.5, "b": 0.0}[outcome] for outcome in outcomes]
    return Wins(counts["a"], counts["b"], counts["tie"], mean_of(points, questions, seed))


def first_place_share(labels: Iterable[str]) -> tuple[int, float | None]:
    """Of verdicts `A`, `B`, `tie` as they were said: how many named a winner, and which part named the first one."""
    counts = Counter(labels)
    decided = counts["A"] + counts["B"]
    return decided, counts["A"] / decided if decided else None


def kappa(first: Sequence[Any], second: Sequence[Any], labels: Sequence[Any], weighted: bool) -> float | None:
    """Cohen's kappa of two judges over the same items; `weighted`: by the square of the distance of two scores.

    None without items, or where both always say the same one label: then agreement says nothing.
    """
    if not first or (len(set(first)) == 1 and set(first) == set(second)):
        return None
    from sklearn.metrics import cohen_kappa_score

    value = float(
        cohen_kappa_score(list(first), list(second), labels=list(labels), weights="quadratic" if weighted else None)
    )
    return None if math.isnan(value) else value
