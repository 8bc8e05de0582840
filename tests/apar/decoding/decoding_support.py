"""Drafters that guess at random, decoders around them, and the plain forwards that a tree must equal."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, VOCAB_SIZE

from apar.decoding import Decoder, TreeModel
from apar.decoding.drafting import NO_PARENT, Draft, DrafterFactory, NoDrafting, Outcome
from apar.options import ControlTokens, ForkLimits

CONTROL = ControlTokens(FORK, CHILD)


def random_draft(random: Random, num_nodes: int, vocab_size: int = VOCAB_SIZE) -> Draft:
    parents = [random.randrange(NO_PARENT, node) if node else NO_PARENT for node in range(num_nodes)]
    tokens = [random.randrange(vocab_size) for _ in range(num_nodes)]
    return Draft(tokens, parents, random.randint(0, num_nodes))


class Guessing:
    """Drafts trees of random tokens, and now and then what the same model said at an earlier step."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, max_nodes: int = 12) -> None:
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes
        self.outcomes: list[Outcome] = []

    def start(self, prompt_token_ids: Sequence[int], seed: int) -> "Guesser":
        return Guesser(self, list(prompt_token_ids), seed)


class Guesser:
    needs_hidden = True

    def __init__(self, guessing: Guessing, path: list[int], seed: int) -> None:
        self._guessing = guessing
        self._random = Random(seed)
        self.path = path
        self._said: list[int] = []

    def propose(self) -> Draft:
        random = self._random
        draft = random_draft(random, random.randint(0, self._guessing.max_nodes), self._guessing.vocab_size)
        if len(draft) and self._said and random.random() < 0.7:
            draft.token_ids[0] = random.choice(self._said)
        return draft

    def observe(self, outcome: Outcome) -> None:
        assert outcome.hidden_h is not None
        assert len(outcome.accepted) == len(outcome.taken) - 1
        assert [outcome.draft.token_ids[node] for node in outcome.accepted] == outcome.taken[:-1]
        assert list(outcome.path) == [*self.path, *outcome.taken]
        self.path = list(outcome.path)
        self._said = [outcome.next_token, *outcome.predictions]
        self._guessing.outcomes.append(outcome)

    def fork(self, path: Sequence[int]) -> "Guesser":
        assert list(path[-2:]) == [FORK, CHILD]
        return Guesser(self._guessing, list(path), self._random.randrange(1 << 30))


def decoder(
    model: TreeModel,
    drafting: DrafterFactory | None = None,
    *,
    forks: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    control: ControlTokens | None = CONTROL,
    **limits: int,
) -> Decoder:
    return Decoder(model, drafting or NoDrafting(), control, ForkLimits(**limits), [EOS], max_model_len, forks=forks)


def plain_logits(hf: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [vocabulary] behind a text, computed without any cache."""
    with torch.inference_mode():
        logits: torch.Tensor = hf(torch.tensor([list(token_ids)])).logits[0, -1].float()
    return logits
