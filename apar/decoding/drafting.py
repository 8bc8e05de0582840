"""What drafts: before a forward a drafter proposes a tree behind a thread's path, afterwards it sees what became of it.

In: the thread's path and, after each step, the tokens it took and the model's predictions. Out: a `Draft`. The
candidate tree in it is verified, and only verified tokens are output: a drafter decides how fast an answer comes, never
which one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

NO_PARENT = -1
"""The parent of a node that hangs from the last token of the thread's path."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Trees of tokens behind a thread's path, computed in one forward.

    A node attends to the path, to its ancestors and to itself, and its position is the path's length plus its depth
    (from 0). Parents come before their children. Two nodes of one parent may hold the same token.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Per node its parent's index, or `NO_PARENT`."""
    num_candidates: int = 0
    """The first so many nodes are the candidate tree, which is verified; the others are the drafter's own business."""

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.token_ids) >= self.num_candidates

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did with a thread's draft."""

    draft: Draft
    path: Sequence[int]
    """The thread's path now, with the tokens of this step."""
    taken: list[int]
    """The tokens of this step: accepted drafts, then the one the model chose itself. Never empty."""
    accepted: list[int]
    """Indices of the accepted nodes in the draft, from the path on; `len(taken) - 1` of them."""
    next_token: int
    """The model's best token behind the path as it was before the step."""
    predictions: list[int]
    """Per node of the draft the model's best token behind it, banned tokens left out."""
    hidden_h: torch.Tensor | None
    """The last hidden state [hidden size] that the last of `taken` was chosen from; None unless the drafter asks."""


class Drafter(Protocol):
    """One thread's drafter. A new one is made for every answer, and for each thread that is forked."""

    needs_hidden: bool
    """Whether outcomes must carry hidden states."""

    def propose(self) -> Draft:
        """The draft behind the path of the latest outcome (before the first: the prompt)."""
        ...

    def observe(self, outcome: Outcome) -> None: ...

    def fork(self, path: Sequence[int]) -> "Drafter":
        """The drafter of a child thread, whose path ends with [Fork] [Child]."""
        ...


class DrafterFactory(Protocol):
    """A decoder's way of drafting, with its settings; serves any number of answers."""

    def start(self, prompt_token_ids: Sequence[int], seed: int) -> Drafter:
        """The drafter of an answer's root thread; `seed` makes whatever is random in it repeatable."""
        ...


class NoDrafter:
    """Plain decoding: a token per step."""

    needs_hidden = False

    def propose(self) -> Draft:
        return Draft()

    def observe(self, outcome: Outcome) -> None:
        pass

    def fork(self, path: Sequence[int]) -> "NoDrafter":
        return self


class NoDrafting:
    def start(self, prompt_token_ids: Sequence[int], seed: int) -> NoDrafter:
        return NoDrafter()
