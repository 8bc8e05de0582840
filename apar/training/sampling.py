"""Which answers a step learns from: a function of the seed and the step alone, so that a run resumes anywhere.

Structured and unstructured answers are drawn apart, each sort without replacement: all of a sort, in an order of its
own, before any comes again (the next time round in another order). Of each batch a fixed share is structured;
where that is no whole number, batches take turns so that the share holds over any run of them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Sampler:
    def __init__(self, num_structured: int, num_unstructured: int, batch_size: int, share: float, seed: int) -> None:
        """
        Args:
            share: of structured answers. A sort whose share is above 0 must have an answer.
        """
        self._sizes = (num_structured, num_unstructured)
        self._batch_size = batch_size
        self._share = share
        self._order = lru_cache(maxsize=8)(
            lambda sort, time: np.random.default_rng([seed, sort, time]).permutation(self._sizes[sort])
        )

    def batch(self, step: int) -> tuple[list[int], list[int]]:
        """Indices of the structured and of the unstructured answers of a step, counted from 0."""
        before, after = (math.floor(self._share * self._batch_size * n + 0.5) for n in (step, step + 1))
        total = self._batch_size
        return self._draw(0, before, after), self._draw(1, step * total - before, (step + 1) * total - after)

    def steps(self, epochs: float) -> int:
        """Steps until every answer of both sorts has come `epochs` times at least."""
        per_step = (self._share * self._batch_size, (1 - self._share) * self._batch_size)
        return max(
            1, *(math.ceil(epochs * size / rate) for size, rate in zip(self._sizes, per_step, strict=True) if rate > 0)
        )

    def _draw(self, sort: int, start: int, end: int) -> list[int]:
        size = self._sizes[sort]
        return [int(self._order(sort, number // size)[number % size]) for number in range(start, end)]


def take(sampler: Sampler, step: int, structured: Sequence[T], unstructured: Sequence[T]) -> list[T]:
    first, second = sampler.batch(step)
    return [*(structured[i] for i in first), *(unstructured[i] for i in second)]
