"""What drafters of the model's own guesses have in common: a pool that all threads of an answer draft from, and chance
that a seed makes repeatable."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from random import Random
from typing import ClassVar, Generic, Self, TypeVar

from apar.decoding.drafting import Draft, Outcome
from apar.decoding.errors import DecodingError

Options = TypeVar("Options")
Pool = TypeVar("Pool")


class PooledDrafter(ABC, Generic[Options, Pool]):
    """One thread's drafter."""

    needs_hidden = False

    def __init__(
        self, options: Options, eos_token_ids: frozenset[int], pool: Pool, path: Sequence[int], random: Random
    ) -> None:
        self._options = options
        self._eos_token_ids = eos_token_ids
        self._pool = pool
        self._random = random
        self._last_token = path[-1]
        self._begin(path)

    def fork(self, path: Sequence[int]) -> Self:
        """A child drafts on its own, for its path is another; what is in the pool may come in both."""
        random = Random(self._random.getrandbits(64))  # noqa: S311  no secret depends on it
        return type(self)(self._options, self._eos_token_ids, self._pool, path, random)

    @staticmethod
    @abstractmethod
    def make_pool(options: Options) -> Pool:
        """An answer's pool, empty."""

    @abstractmethod
    def _begin(self, path: Sequence[int]) -> None: ...
    @abstractmethod
    def propose(self) -> Draft: ...
    @abstractmethod
    def observe(self, outcome: Outcome) -> None: ...


class PooledDrafting(Generic[Options, Pool]):
    drafter: ClassVar[type[PooledDrafter]]  # type: ignore[type-arg]

    def __init__(self, options: Options, eos_token_ids: Collection[int]) -> None:
        self._options = options
        self._eos_token_ids = frozenset(eos_token_ids)

    def start(self, prompt_token_ids: Sequence[int], seed: int) -> PooledDrafter[Options, Pool]:
        pool = self.drafter.make_pool(self._options)
        random = Random(seed)  # noqa: S311
        return self.drafter(self._options, self._eos_token_ids, pool, prompt_token_ids, random)


def check_whole(decoder: str, options: object, **least: int) -> None:
    """
    Raises:
        DecodingError: a setting is no whole number, or below its least.
    """
    for name, limit in least.items():
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < limit:
            raise DecodingError(f"{decoder}'s {name} is {value!r}: use a whole number, at least {limit}")
