"""Medusa: a tree of guesses by heads on the model's last hidden state, verified in the next forward.

Head k guesses what stands k places behind a thread's newest token. The candidate tree is the product of the heads'
best guesses, cut to the nodes that are likeliest as whole paths: head 1's third guess may be worth less than what
head 2 says behind its first.

Source: Medusa (Cai et al., 2023), sections 2.1 and 2.2; there the cut is fixed beforehand, from measured accuracies.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.medusa_heads import MedusaHeads
from apar.decoding.pooled import check_whole


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    top_k: int = 10
    """Guesses of a head behind one node."""
    max_nodes: int = 16
    """Of a candidate tree."""

    def __post_init__(self) -> None:
        check_whole("medusa", self, top_k=1, max_nodes=1)


class MedusaDrafting:
    """Drafts with one model's heads."""

    def __init__(self, heads: MedusaHeads, options: MedusaOptions = MedusaOptions()) -> None:
        self.heads = heads
        self.options = options

    def start(self, prompt_token_ids: Sequence[int], seed: int) -> "MedusaDrafter":
        return MedusaDrafter(_Batch(self))

    def drafts(self, hidden_nh: torch.Tensor) -> list[Draft]:
        """The candidate trees behind the tokens that were chosen from these hidden states."""
        heads, most = self.heads, self.options.max_nodes
        with torch.inference_mode():
            logits_knv = heads(hidden_nh.to(heads.dtype)).float()
            best = logits_knv.softmax(-1).topk(min(self.options.top_k, heads.vocab_size))
        tokens, probabilities = best.indices.transpose(0, 1).tolist(), best.values.transpose(0, 1).tolist()
        return [candidate_tree(*guesses, most) for guesses in zip(tokens, probabilities, strict=True)]


class MedusaDrafter:
    """One thread's drafter: it knows what the newest hidden state says, nothing else."""

    needs_hidden = True

    def __init__(self, batch: "_Batch") -> None:
        self._batch = batch
        self.draft: Draft | None = Draft()
        """None: not computed yet. Before a thread's first forward, of the prompt or of [Child], there is no state."""

    def propose(self) -> Draft:
        if self.draft is None:
            self._batch.compute()
        assert self.draft is not None
        return self.draft

    def observe(self, outcome: Outcome) -> None:
        assert outcome.hidden_h is not None
        self.draft = None
        self._batch.waiting.append((self, outcome.hidden_h))

    def fork(self, path: Sequence[int]) -> "MedusaDrafter":
        return MedusaDrafter(self._batch)


class _Batch:
    """The threads of one answer that wait for their drafts: computed together, they read the heads' weights once."""

    def __init__(self, drafting: MedusaDrafting) -> None:
        self._drafting = drafting
        self.waiting: list[tuple[MedusaDrafter, torch.Tensor]] = []

    def compute(self) -> None:
        drafts = self._drafting.drafts(torch.stack([hidden_h for _, hidden_h in self.waiting]))
        for (drafter, _), draft in zip(self.waiting, drafts, strict=True):
            drafter.draft = draft
        self.waiting.clear()


def candidate_tree(tokens: Sequence[Sequence[int]], probabilities: Sequence[Sequence[float]], max_nodes: int) -> Draft:
    """The likeliest nodes of the product of all heads' guesses; a node's parent is always among them.

    Args:
        tokens: per head, its guesses from the best on.
        probabilities: theirs.
    """
    draft = Draft()
    # Entries: minus the path's probability, then what settles a tie the same way every time (the order they came in).
    waiting = [(-probability, i, 0, i, NO_PARENT) for i, probability in enumerate(probabilities[0])]
    heapq.heapify(waiting)
    num_seen = len(waiting)
    while waiting and len(draft) < max_nodes:
        negative, _, head, guess, parent = heapq.heappop(waiting)
        node = len(draft)
        draft.token_ids.append(tokens[head][guess])
        draft.parents.append(parent)
        if head + 1 < len(tokens):
            for i, probability in enumerate(probabilities[head + 1]):
                heapq.heappush(waiting, (negative * probability, num_seen, head + 1, i, node))
                num_seen += 1
    return Draft(draft.token_ids, draft.parents, num_candidates=len(draft))
