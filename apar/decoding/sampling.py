"""From logits to the distribution a token is drawn from.

The filters are transformers' own, in vLLM's order: temperature, min-p, top-k, top-p.
"""

from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from apar.decoding.errors import DecodingError


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    temperature: float = 0.0
    """0: greedy, and the other values say nothing."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int | None = None
    """None: another answer each time."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise DecodingError(f"temperature is {self.temperature}: use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise DecodingError(f"top_p is {self.top_p}: use more than 0, at most 1")
        if self.top_k < 0:
            raise DecodingError(f"top_k is {self.top_k}: use 0 (off) or more")
        if not 0 <= self.min_p <= 1:
            raise DecodingError(f"min_p is {self.min_p}: use 0 (off) to 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def filters(self) -> LogitsProcessorList:
        filters = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        if self.min_p > 0:
            filters.append(MinPLogitsWarper(self.min_p))
        if self.top_k > 0:
            filters.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            filters.append(TopPLogitsWarper(self.top_p))
        return filters


class Distribution:
    """Turns logits into probabilities under one request's options."""

    def __init__(self, options: SamplingOptions) -> None:
        self._filters = options.filters()

    def __call__(self, logits_nv: torch.Tensor) -> torch.Tensor:
        """Probabilities, float64 [n, vocabulary], of float32 logits [n, vocabulary]; -inf stays impossible."""
        no_ids = torch.empty((logits_nv.shape[0], 0), dtype=torch.long, device=logits_nv.device)
        filtered: torch.Tensor = self._filters(no_ids, logits_nv)
        return filtered.double().softmax(dim=-1)
