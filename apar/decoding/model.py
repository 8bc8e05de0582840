"""A causal language model of transformers that computes trees: many tokens behind many paths in one forward.

In: per thread the slots of its path, the path's tokens that are not cached yet, and a draft. Out: per thread the logits
behind the path and behind every node of the draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apar.decoding.cache import SlotCache
from apar.decoding.drafting import NO_PARENT, Draft
from apar.decoding.errors import DecodingError

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention of transformers that takes any mask."""
PROBE_ERROR = 0.05
"""Largest share of the logits' spread by which a tree may differ from plain text: bfloat16 errs by a few hundredths."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward computes for one thread."""

    slots: Sequence[int]
    """Of the path's cached positions, from its first token on."""
    pending: Sequence[int]
    """The path's remaining tokens, at least one."""
    draft: Draft


@dataclass(frozen=True, slots=True)
class Computed:
    """Shapes: n = 1 + nodes of the draft; row 0 stands behind the path's last token, row 1 + i behind node i."""

    slots: list[int]
    """Now held for the pending tokens, then for the nodes."""
    logits_nv: torch.Tensor
    """float32 [n, vocabulary]"""
    hidden_nh: torch.Tensor
    """What the output embedding read, [n, hidden size] in the model's dtype."""


class TreeModel:
    """Wraps a loaded model; `hf` stays usable as it is."""

    def __init__(self, hf: Any) -> None:
        """
        Raises:
            DecodingError: the model does not compute what a tree needs; the message says what.
        """
        self.hf = hf.eval()
        self.config = hf.config.get_text_config()
        self.device: torch.device = hf.device
        self.max_model_len = int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)
        window = getattr(self.config, "sliding_window", None)
        if window is not None and getattr(self.config, "use_sliding_window", True):
            self.max_model_len = min(self.max_model_len, window)  # within the window every layer sees everything
        self.num_layers = int(self.config.num_hidden_layers)
        self.vocab_size = int(self.config.vocab_size)
        attention = self.config._attn_implementation
        if attention not in MASKED_ATTENTION:
            raise DecodingError(f"the model uses {attention} attention, which takes no tree masks: load it with sdpa")
        self._read: torch.Tensor | None = None
        output_embeddings = hf.get_output_embeddings()
        if output_embeddings is None:
            raise DecodingError(f"{type(hf).__name__} has no output embeddings: use a causal language model")
        output_embeddings.register_forward_pre_hook(self._remember)
        self._probe()

    def new_cache(self) -> SlotCache:
        return SlotCache(self.num_layers)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(self, cache: SlotCache, works: Sequence[Work]) -> list[Computed]:
        """Compute all pending tokens and drafts at once. The new slots are the caller's to keep or release."""
        slots = [cache.pool.take(len(work.pending) + len(work.draft)) for work in works]
        input_ids = [token for work in works for token in (*work.pending, *work.draft.token_ids)]
        positions = [position for work in works for position in self._positions(work)]
        sees = _mask(works, slots, cache.pool.num_spanned)
        rows, kept = 0, []
        for work in works:
            kept.append(np.arange(rows + len(work.pending) - 1, rows + len(work.pending) + len(work.draft)))
            rows += len(work.pending) + len(work.draft)
        tensor = self._tensor
        cache.write_to(tensor([slot for taken in slots for slot in taken]))
        mask = torch.zeros(sees.shape, dtype=self.hf.dtype).masked_fill_(~torch.from_numpy(sees), -torch.inf)
        output = self.hf(
            input_ids=tensor([input_ids]),
            position_ids=tensor([positions]),
            attention_mask=mask[None, None].to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=tensor(np.concatenate(kept)),
        )
        hidden, self._read = self._read, None
        assert hidden is not None
        sizes = [len(indices) for indices in kept]
        logits = output.logits[0].float().split(sizes)
        return [Computed(*parts) for parts in zip(slots, logits, hidden[0].split(sizes), strict=True)]

    def _positions(self, work: Work) -> list[int]:
        start = len(work.slots)
        end = start + len(work.pending)
        depths: list[int] = []
        for parent in work.draft.parents:
            depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
        # Drafts may reach behind the model's last position; what is drafted there is never taken.
        return [*range(start, end), *(min(end + depth, self.max_model_len - 1) for depth in depths)]

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.long).to(self.device)

    def _remember(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._read = inputs[0]

    def _probe(self) -> None:
        """Compare a tree of two branches with plain text: models exist that ignore positions or masks of ours.

        Recurrent and sliding-window layers, too, fail here or in the cache.
        """
        ids = [(7 * i + 11) % self.vocab_size for i in range(10)]
        prompt, left, right = ids[:4], ids[4:7], ids[7:]
        draft = Draft([*left, *right], [NO_PARENT, 0, 1, NO_PARENT, 3, 4])
        try:
            cache = self.new_cache()
            first = self.forward(cache, [Work([], prompt[:2], Draft())])[0]
            tree = self.forward(cache, [Work(first.slots, prompt[2:], draft)])[0].logits_nv[[3, 6]]
            with torch.inference_mode():
                plain = torch.stack(
                    [self.hf(self._tensor([[*prompt, *branch]])).logits[0, -1].float() for branch in (left, right)]
                )
        except (TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
            raise DecodingError(f"{type(self.hf).__name__} cannot compute trees of tokens: {error}") from error
        spread = float(plain.std())
        error_share = float((tree - plain).abs().max()) / max(spread, 1e-9)
        if not error_share <= PROBE_ERROR * (1 if self.hf.dtype == torch.float32 else 10):
            raise DecodingError(
                f"{type(self.hf).__name__} does not follow positions and tree masks (logits differ by "
                f"{error_share:.2g} of their spread): only decoders with full attention in every layer can be used"
            )


def load_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> TreeModel:
    """Load a Hugging Face folder.

    Args:
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: the one it was saved in.

    Raises:
        DecodingError: it cannot be loaded or used; the message says why.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return TreeModel(hf.to(device))
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        raise DecodingError(f"{folder} cannot be loaded on {device}: {error}") from error


def _mask(
    works: Sequence[Work], slots: Sequence[Sequence[int]], num_spanned: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Who sees whom: bool [tokens of this forward, slots spanned]."""
    num_rows = sum(len(taken) for taken in slots)
    sees = np.zeros((num_rows, num_spanned), dtype=bool)
    row = 0
    for work, taken in zip(works, slots, strict=True):
        num_pending = len(work.pending)
        rows = sees[row : row + len(taken)]
        rows[:, np.asarray(work.slots, dtype=np.int64)] = True
        own = np.tri(len(taken), len(taken), dtype=bool)
        own[num_pending:, num_pending:] = False
        for node, parent in enumerate(work.draft.parents):
            if parent != NO_PARENT:
                own[num_pending + node, num_pending:] = own[num_pending + parent, num_pending:]
            own[num_pending + node, num_pending + node] = True
        rows[:, np.asarray(taken, dtype=np.int64)] = own
        row += len(taken)
    return sees
