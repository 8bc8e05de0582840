"""Lookahead Decoding, the baseline that PTD is measured against.

A window of W columns and N-1 levels lies behind the path. Column i of level 0 is a guess of the i-th token after the
path's last one, which is column 0 itself; each further level is what the model predicted behind the level before, one
forward ago. So every forward yields W n-grams: a column's tokens and the prediction behind them. They are kept by their
first token and verified when the path ends with it.

Source: the Lookahead Decoding paper (arXiv 2402.02057) and its authors' public description, with their defaults.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.pooled import PooledDrafter, PooledDrafting, check_whole


@dataclass(frozen=True, slots=True)
class LadeOptions:
    window: int = 7
    """W: n-grams made in one forward."""
    ngram: int = 5
    """N: tokens of an n-gram, the one it is kept under included."""
    guesses: int = 7
    """G: n-grams kept under a token, and verified in one forward."""

    def __post_init__(self) -> None:
        check_whole("lade", self, window=1, ngram=3, guesses=1)


class NgramPool:
    """Per first token the last `guesses` n-grams seen, as what follows it."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, key: int, rest: tuple[int, ...]) -> None:
        ngrams = self._ngrams.setdefault(key, {})
        ngrams.pop(rest, None)  # the most recent stands last
        ngrams[rest] = None
        if len(ngrams) > self._guesses:
            del ngrams[next(iter(ngrams))]

    def __getitem__(self, key: int) -> list[tuple[int, ...]]:
        """The most recent first."""
        return list(reversed(self._ngrams.get(key, {})))


class LadeDrafter(PooledDrafter[LadeOptions, NgramPool]):
    @staticmethod
    def make_pool(options: LadeOptions) -> NgramPool:
        return NgramPool(options.guesses)

    def _begin(self, path: Sequence[int]) -> None:
        options = self._options
        # An EOS in the window would have the model guess what follows the end.
        self._fillers = [token_id for token_id in path if token_id not in self._eos_token_ids] or [path[-1]]
        # The first level is longer by a column for each that is still to come: each costs the others one.
        first = self._random.choices(self._fillers, k=options.window + options.ngram - 3)
        self._levels: list[list[int]] = [first]
        """Level 0 without column 0; the others whole."""

    def propose(self) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        for rest in self._pool[self._last_token]:
            parents += [NO_PARENT, *range(len(token_ids), len(token_ids) + len(rest) - 1)]
            token_ids += rest
        num_candidates = len(token_ids)
        above = [NO_PARENT]
        for level, tokens in enumerate(self._levels):
            here = list(range(len(token_ids), len(token_ids) + len(tokens)))
            token_ids += tokens
            parents += [NO_PARENT, *here[:-1]] if level == 0 else above
            above = [NO_PARENT, *here] if level == 0 else here
        return Draft(token_ids, parents[: len(token_ids)], num_candidates)

    def observe(self, outcome: Outcome) -> None:
        options = self._options
        window = outcome.predictions[outcome.draft.num_candidates :]
        last_level = window[len(window) - len(self._levels[-1]) :]
        if len(self._levels) == options.ngram - 1:
            self._keep_ngrams(last_level)
        made = [self._random.choice(self._fillers) if p in self._eos_token_ids else p for p in last_level]
        if len(self._levels) < options.ngram - 1:
            # Filling: all move one column on, so the new level begins where column 0 will be then.
            self._levels = [level[1:] for level in self._levels] + [made if len(self._levels) == 1 else made[1:]]
        else:
            # A level is one token further on than the one before: taking its place it stays where it is.
            self._levels = [self._levels[1][1:], *self._levels[2:], made]
        self._last_token = outcome.path[-1]

    def _keep_ngrams(self, last_level: Sequence[int]) -> None:
        firsts = [self._last_token, *self._levels[0]]
        for key, *rest in zip(firsts, *self._levels[1:], last_level, strict=True):
            if key not in self._eos_token_ids:
                self._pool.add(key, tuple(rest))


class LadeDrafting(PooledDrafting[LadeOptions, NgramPool]):
    drafter = LadeDrafter
