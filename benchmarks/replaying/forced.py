"""A vLLM logits processor that lets every request sample exactly its script.

`LLM(..., logits_processors=["benchmarks.replaying.forced:ForcedTokens"])`; a request brings its `Replay` in
`SamplingParams.extra_args`. A child thread is an ordinary request to vLLM: its prompt is the path to it and its
`extra_args` are its root's, which is all it takes to find its place in the script. Both sides of the benchmark run it,
so that its cost is equal.
"""

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from benchmarks.replaying.scripts import EXTRA_ARGS_KEY, read_replay

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_CERTAIN = 1e30
"""A logit above whatever a model gives, yet finite in every dtype vLLM samples from (float32)."""

_Row = tuple[list[int], list[int]]
"""All tokens the thread samples, and vLLM's own, growing list of those it has sampled."""


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Forces the token that stands in the script at the thread's place."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` is (rows, vocabulary) and changed in place."""
        if self._rows:
            # How many tokens a thread has sampled is its place: a count also holds where vLLM, scheduling ahead, has
            # only placeholders for the last tokens. Behind its EOS a thread samples nothing that anybody keeps.
            tokens = [forced[min(len(sampled), len(forced) - 1)] for forced, sampled in self._rows.values()]
            rows = torch.tensor(list(self._rows), device=self._device)
            logits[rows, torch.tensor(tokens, device=self._device)] = _CERTAIN
        return logits


def _new_row(params: "SamplingParams", prompt: list[int] | None, sampled: list[int]) -> _Row | None:
    text = (params.extra_args or {}).get(EXTRA_ARGS_KEY)
    if text is None:
        return None
    return read_replay(text).forced_tokens(prompt or []), sampled
