"""The frozen base and the heads on it while they are trained.

Receives a base folder; hands the loop losses of rows, and figures of held-out ones. Only the heads learn, so no
gradient is kept in the base.

Shape suffixes: n labels, d hidden.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apar.decoding.medusa_heads import MedusaHeads, save_heads
from apar.decoding.medusa_training.labels import head_labels
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.errors import InputError
from apar.training import attention
from apar.training.objective import CHUNK, Head, summed_loss
from apar.training.packing import Row
from apar.training.sequences import IGNORED

TOP = 5


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One head's figures over the held-out answers."""

    loss: float
    """Per label, in nats."""
    top1: float
    """Part of the labels that are the head's best guess."""
    top5: float
    """Part of the labels among its five best."""
    num_labels: int


class TrainedHeads:
    def __init__(self, options: MedusaTrainingOptions, device: torch.device) -> None:
        """Load the base, and make the heads.

        Raises:
            InputError: no such folder, or a model that heads cannot be trained for.
        """
        self.device = device
        self._dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        base = _load(options, self._dtype, device)
        self._decoder = base.get_decoder()
        self.heads = MedusaHeads.beginning(base.get_output_embeddings().weight.detach(), options.heads, options.layers)
        self.kept_dtype = base.config.dtype or torch.float32

    def losses(self, row: Row) -> list[Tensor]:
        """Per head, cross entropy summed over its labels in the row; float32 []."""
        states, labels = self._states_and_labels(row)
        outputs = self.heads.outputs()
        return [
            summed_loss(features_nd, Head(outputs[head], None, None, self._dtype), labels[head])
            for head, features_nd in enumerate(self._features(states))
        ]

    def num_labels(self, row: Row) -> list[int]:
        """Per head."""
        table = np.concatenate([head_labels(tree, len(self.heads)) for tree in row.trees], axis=1)[1:]
        counts: list[int] = (table != IGNORED).sum(1).tolist()
        return counts

    def evaluate(self, rows: list[Row]) -> list[dict[str, Any]]:
        """A `HeldOut` per head, as mappings; none without a label."""
        sums = np.zeros((len(self.heads), 3))
        counts = np.zeros(len(self.heads), np.int64)
        outputs = [output.detach().to(self._dtype) for output in self.heads.outputs()]
        with torch.no_grad():
            for row in rows:
                states, labels = self._states_and_labels(row)
                for head, features_nd in enumerate(self._features(states)):
                    sums[head] += _scores(features_nd.to(self._dtype), outputs[head], labels[head])
                    counts[head] += len(labels[head])
        if not counts.all():
            return []
        figures = []
        for part, n in zip(sums, counts.tolist(), strict=True):
            loss, top1, top5 = (part / n).tolist()
            figures.append(asdict(HeldOut(loss, top1, top5, n)))
        return figures

    def check(self, row: Row) -> None:
        """Compute a row.

        Raises:
            InputError: the base does not hand the tree mask on to its attention.
        """
        try:
            self._states_and_labels(row)
        except (ValueError, TypeError) as error:
            line = " ".join(str(error).split())
            raise InputError(f"the base cannot be run on trees ({line[:200]}): use one like Llama or Qwen") from None

    def write(self, folder: Path) -> None:
        save_heads(self.heads, folder, self.kept_dtype)

    def _features(self, states: list[Tensor]) -> list[Tensor]:
        """Per head, what its output layer reads at its own labels, [n, d]."""
        return [head[:-1](states_nd) for head, states_nd in zip(self.heads, states, strict=True)]

    def _states_and_labels(self, row: Row) -> tuple[list[Tensor], list[Tensor]]:
        """Per head: the base's last hidden states where the head has labels, float32 [n, d], and the labels [n]."""
        token_ids, positions, _ = row.tensors(self.device)
        masks = attention.masks(row, self.device, self._dtype)
        table = np.concatenate([head_labels(tree, len(self.heads)) for tree in row.trees], axis=1)[1:]
        labels = torch.from_numpy(table).to(self.device)
        with torch.no_grad():
            output = self._decoder(input_ids=token_ids, position_ids=positions, use_cache=False, **masks)
            hidden_td = output.last_hidden_state[0].float()
        return [hidden_td[mine != IGNORED] for mine in labels], [mine[mine != IGNORED] for mine in labels]


def _scores(features_nd: Tensor, output_vd: Tensor, labels_n: Tensor) -> list[float]:
    """Sums over the labels: loss, best guesses, five best guesses."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(labels_n), CHUNK):
        labels = labels_n[start : start + CHUNK, None]
        logits = torch.nn.functional.linear(features_nd[start : start + CHUNK], output_vd).float()
        hits = logits.topk(min(TOP, logits.shape[1])).indices == labels
        loss = (logits.logsumexp(1, keepdim=True) - logits.gather(1, labels)).sum()
        sums += torch.tensor([loss.item(), hits[:, 0].sum().item(), hits.sum().item()], dtype=torch.float64)
    found: list[float] = sums.tolist()
    return found


def _load(options: MedusaTrainingOptions, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    base = options.base
    attention.register()
    try:
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, attn_implementation=attention.implementation(device), local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise InputError(f"{base} does not load as a causal language model: {line[:200]}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.most_tokens > longest:
        raise InputError(
            f"{base} has {longest} positions, answers have up to {options.most_tokens} tokens: "
            f"give --max-tokens {longest}"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise InputError(f"{type(model).__name__} has an unusual output layer: use a model like Llama or Qwen")
    model.config.dtype = config.dtype  # loading has put ours there
    model.requires_grad_(False)
    return model.to(device).eval()
