"""Which candidates a step accepts, and the token the model adds itself.

Both ways leave the model's own choice untouched: greedily, the tokens are those of plain greedy decoding; with
sampling, their distribution is the model's, under the request's temperature and filters.

Source: PTD paper, section 3.2; SpecInfer's sampling without replacement, made exact by drawing a fresh number for each
child and by sampling the residual.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from apar.decoding.drafting import NO_PARENT, Draft
from apar.decoding.sampling import Distribution, SamplingOptions


class Verdict(NamedTuple):
    accepted: list[int]
    """Indices of the accepted nodes, from the path on."""
    token: int
    """What follows the last accepted node, or the path if none was."""


class Verifier(Protocol):
    def __call__(self, draft: Draft, logits_nv: torch.Tensor, best: Sequence[int]) -> Verdict:
        """
        Args:
            logits_nv: float32 [1 + nodes, vocabulary]; row 0 stands behind the path, row 1 + i behind node i.
            best: the argmax of each row.
        """
        ...


def verify_greedily(draft: Draft, logits_nv: torch.Tensor, best: Sequence[int]) -> Verdict:
    """Follow the argmax while it is a candidate."""
    children = _children(draft)
    accepted: list[int] = []
    alike = [NO_PARENT]
    while True:
        token = best[1 + alike[0]]
        # Chains of their own may begin alike: nodes with equal tokens above them are one place in the text.
        alike = [child for parent in alike for child in children[parent] if draft.token_ids[child] == token]
        if not alike:
            return Verdict(accepted, token)
        accepted.append(alike[0])


class SamplingVerifier:
    """Verifies against the distribution of one thread; draws from the thread's own generator."""

    def __init__(self, options: SamplingOptions, generator: torch.Generator) -> None:
        self._distribution = Distribution(options)
        self._generator = generator

    def __call__(self, draft: Draft, logits_nv: torch.Tensor, best: Sequence[int]) -> Verdict:
        children = _children(draft)
        accepted: list[int] = []
        alike = [NO_PARENT]
        while True:
            probabilities_v = self._distribution(logits_nv[1 + alike[0]][None])[0].cpu()
            by_token: dict[int, list[int]] = defaultdict(list)
            for parent in alike:
                for child in children[parent]:
                    by_token[draft.token_ids[child]].append(child)
            for token, nodes in by_token.items():
                if accepts(probabilities_v, token, self._uniform()):
                    accepted.append(nodes[0])
                    alike = nodes
                    break
                probabilities_v = residual(probabilities_v, token)
            else:
                token = int(torch.multinomial(probabilities_v, 1, generator=self._generator))
                return Verdict(accepted, token)

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def accepts(probabilities_v: torch.Tensor, token: int, uniform: float) -> bool:
    """Whether a candidate is taken, for a number drawn from [0, 1) for this candidate alone."""
    return uniform < float(probabilities_v[token])


def residual(probabilities_v: torch.Tensor, token: int) -> torch.Tensor:
    """The distribution of the next token once a candidate has been refused."""
    left_v = probabilities_v.clone()
    left_v[token] = 0.0
    return left_v / left_v.sum()


def _children(draft: Draft) -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for node in range(draft.num_candidates):
        children[draft.parents[node]].append(node)
    return children
