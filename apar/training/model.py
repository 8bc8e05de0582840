"""The model while it is trained: loaded, given its control rows, wrapped for LoRA or not, asked for losses.

Receives a base folder; hands the loop losses of rows, parameter groups, and what a checkpoint keeps.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apar.errors import InputError
from apar.training import adapter, attention
from apar.training.distillation import plain_row, soft_and_barred
from apar.training.objective import Head, SoftTargets, label_and_token_probabilities, summed_loss
from apar.training.options import TrainingOptions
from apar.training.packing import Row
from apar.training.sequences import IGNORED, AnswerNode, linearise
from apar.training.vocabulary import Vocabulary, fit_embeddings

UNUSUAL = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models that change logits behind the output embedding, which our loss would not see."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Figures of one evaluation."""

    loss: float
    """Per label, in nats."""
    fork_due: float
    """Mean probability of [Fork] where it is the label."""
    fork_not_due: float
    """The same at all other labels."""
    num_due: int
    num_labels: int


class TrainedModel:
    def __init__(self, options: TrainingOptions, vocabulary: Vocabulary, device: torch.device) -> None:
        """Load the base.

        Raises:
            InputError: no such folder, or a model that cannot be trained with a tree mask.
        """
        self.device = device
        self._vocabulary = vocabulary
        self._low = options.dtype == "bf16"
        self._dtype = torch.bfloat16 if self._low else torch.float32
        lora = options.method == "lora"
        # Frozen weights are kept as they are computed with; trained ones in float32, or small steps would be lost.
        self._model = _load(options, self._dtype if lora else torch.float32, device)
        fit_embeddings(self._model, vocabulary)
        self._wrapped = None
        if lora:
            self._wrapped = adapter.add_lora(self._model, vocabulary, options.lora_rank, options.alpha)
        self._wrapped_or_model = self._wrapped or self._model
        self._wrapped_or_model.to(device).train()
        self._row_ids = torch.tensor([vocabulary.control.fork, vocabulary.control.child], device=device)
        self._row_factor = options.row_rate / options.lr
        self._decoder = self._model.get_decoder()
        self._distill = options.distill
        self._teacher = None
        """The base, frozen, where training changes its weights; with LoRA it is there beneath the adapter."""
        if options.distill > 0 and not lora:
            self._teacher = copy.deepcopy(self._model).to(device, self._dtype).requires_grad_(False).eval()

    # --- computing ---

    def loss(self, row: Row) -> torch.Tensor:
        """Cross entropy, or divergence from the base at soft labels, summed over the row's labels, float32 []."""
        soft = self._soft_targets(row) if self._distill > 0 else None
        hidden, labels = self._hidden_at_labels(row)
        return summed_loss(hidden, self._head(), labels, soft)

    def evaluate(self, rows: list[Row]) -> HeldOut | None:
        """Loss and probabilities of [Fork] over rows; None where they have no labels."""
        fork = self._vocabulary.control.fork
        self._wrapped_or_model.eval()
        sums = np.zeros(3)
        counts = np.zeros(2, np.int64)
        for row in rows:
            with torch.no_grad():
                hidden, labels = self._hidden_at_labels(row)
            label, forking = label_and_token_probabilities(hidden, self._head(), labels, fork)
            due = labels == fork
            sums += [-label.sum().item(), forking[due].sum().item(), forking[~due].sum().item()]
            counts += [int(due.sum()), len(labels)]
        self._wrapped_or_model.train()
        num_due, num_labels = counts.tolist()
        if num_labels == 0:
            return None
        loss, due_sum, other_sum = sums.tolist()
        return HeldOut(
            loss / num_labels, due_sum / max(num_due, 1), other_sum / max(num_labels - num_due, 1), num_due, num_labels
        )

    def check(self) -> None:
        """Compute a small tree, and each of its paths as the model itself computes a plain sequence.

        Raises:
            InputError: they differ: the model does not follow the mask or the positions it is given.
        """
        usable = min(self._vocabulary.num_base_tokens, 4096)
        ids = np.random.default_rng(0).integers(0, usable, 40).tolist()
        nodes = [AnswerNode(ids[9:14], 1, 2), AnswerNode(ids[14:24]), AnswerNode(ids[24:32], 3, 4)]
        nodes += [AnswerNode(ids[32:38]), AnswerNode(ids[38:40])]
        control, eos = self._vocabulary.control, self._vocabulary.eos_token_id
        tree = linearise(ids[:9], nodes, control, eos)
        other = linearise(ids[20:25], [AnswerNode(ids[25:30])], control, eos)
        row = Row([other, tree])
        self._wrapped_or_model.eval()
        try:
            ours = self.logits(row)[len(other) :]
            for leaf in tree.leaves():
                path = tree.path(leaf)
                alone = linearise(tree.token_ids[path].tolist(), [AnswerNode([])], control, eos)
                theirs = self._own_logits(Row([alone]))
                difference = (ours[torch.from_numpy(path.astype(np.int64))] - theirs).abs().mean() / theirs.std()
                if not difference < (0.1 if self._low else 1e-3):
                    raise InputError(
                        f"{type(self._model).__name__} does not follow a tree mask (logits differ by {difference:.2g} "
                        "of their spread): use a model with ordinary causal attention, such as Llama or Qwen"
                    )
        finally:
            self._wrapped_or_model.train()

    def logits(self, row: Row) -> torch.Tensor:
        """Logits at every token of a row, as the loss sees them; float32 [T, V]."""
        with torch.no_grad():
            head = self._head()
            hidden = self._hidden(row)[0].to(head.dtype)
            logits = torch.nn.functional.linear(hidden, head.weight_vd.to(head.dtype)).float()
            if head.rows_rd is not None:
                logits[:, self._row_ids] = torch.nn.functional.linear(hidden, head.rows_rd.to(head.dtype)).float()
        return logits

    def _own_logits(self, row: Row) -> torch.Tensor:
        token_ids, positions, _ = row.tensors(self.device)
        masks = attention.masks(row, self.device, self._dtype)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self._low):
            output = self._model(input_ids=token_ids, position_ids=positions, use_cache=False, **masks)
        return output.logits[0].float()  # type: ignore[no-any-return]

    def _soft_targets(self, row: Row) -> SoftTargets:
        """What the base says of the row's plain answers."""
        control, eos = self._vocabulary.control, self._vocabulary.eos_token_id
        soft_n, barred_mk = (tensor.to(self.device) for tensor in soft_and_barred(row, control, eos))
        self._wrapped_or_model.eval()  # the base answers without dropout
        with torch.no_grad(), self._wrapped.disable_adapter() if self._wrapped else nullcontext():
            hidden_md, _ = self._hidden_at_labels(plain_row(row, control, eos), self._teacher)
        self._wrapped_or_model.train()
        head = self._teacher.get_output_embeddings().weight if self._teacher else self._head().weight_vd
        return SoftTargets(soft_n, hidden_md, head, barred_mk, self._distill)

    def _hidden(self, row: Row, other: Any = None) -> torch.Tensor:
        """Last hidden states, [1, T, d], of the model or of another one."""
        decoder = self._decoder if other is None else other.get_decoder()
        token_ids, positions, _ = row.tensors(self.device)
        masks = attention.masks(row, self.device, self._dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._low):
            output = decoder(input_ids=token_ids, position_ids=positions, use_cache=False, **masks)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _hidden_at_labels(self, row: Row, other: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        labels = row.tensors(self.device)[2][0]
        at = labels != IGNORED
        return self._hidden(row, other)[0][at], labels[at]

    def _head(self) -> Head:
        output = self._model.get_output_embeddings()
        if self._wrapped is None:
            return Head(output.weight, None, None, self._dtype)
        tokens = output.token_adapter
        return Head(tokens.base_layer.weight, tokens.trainable_tokens_delta["default"], self._row_ids, self._dtype)

    # --- training ---

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self._named()]

    def groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for AdamW; `rate` is each one's full learning rate."""
        rows = [parameter for name, parameter in self._named() if "trainable_tokens_delta" in name]
        others = [parameter for name, parameter in self._named() if "trainable_tokens_delta" not in name]
        groups: list[dict[str, Any]] = [{"params": others, "rate": lr, "weight_decay": weight_decay}]
        if rows:
            groups.append({"params": rows, "rate": lr * self._row_factor, "weight_decay": 0.0})
        return groups

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer step. Control rows inside a whole matrix move `row_lr / lr` times as far as it moves them:
        AdamW's step is its rate times something that does not depend on it."""
        matrices = [] if self._wrapped is not None else self._embeddings()
        before = [matrix[self._row_ids].detach().clone() for matrix in matrices]
        optimizer.step()
        with torch.no_grad():
            for matrix, old in zip(matrices, before, strict=True):
                matrix[self._row_ids] = old + (matrix[self._row_ids] - old) * self._row_factor

    def state(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._named()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(state[name])

    def write(self, folder: Path, max_depth: int, dtype: torch.dtype) -> None:
        """Fill a folder with the full fine-tune, as an ordinary model. Ends the training: weights change their type."""
        assert self._wrapped is None
        adapter.write_model(self._model, self._vocabulary, folder, max_depth=max_depth, dtype=dtype)

    def write_adapter(self, folder: Path, base: str, max_depth: int) -> None:
        assert self._wrapped is not None
        adapter.save(self._wrapped, self._vocabulary, folder, base=base, max_depth=max_depth, dtype=self._dtype)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = self._wrapped_or_model.named_parameters()  # a tied one comes once
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _embeddings(self) -> list[torch.Tensor]:
        weights = (self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight)
        return list({id(weight): weight for weight in weights}.values())


def _load(options: TrainingOptions, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    base = options.base
    if not (base / "config.json").is_file():
        raise InputError(f"{base} is no model folder: it has no config.json")
    attention.register()
    try:
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        _check_config(config, options)
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, attn_implementation=attention.implementation(device), local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise InputError(f"{base} does not load as a causal language model: {line[:200]}") from None
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise InputError(f"{type(model).__name__} has an unusual output layer: use a model like Llama or Qwen")
    model.config.use_cache = False
    return model


def _check_config(config: Any, options: TrainingOptions) -> None:
    for key in UNUSUAL:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise InputError(f"{options.base}: {key} is {getattr(config, key)}: such models cannot be trained yet")
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers - {"full_attention", "sliding_attention"}:
        raise InputError(f"{options.base}: it has layers of {', '.join(sorted(layers))}: use one with plain attention")
    windowed = "sliding_attention" in layers or getattr(config, "use_sliding_window", window is not None)
    if window is not None and windowed and window < options.most_tokens:
        raise InputError(
            f"{options.base}: its attention sees {window} tokens, answers have up to {options.most_tokens}: "
            f"give --max-tokens {window}"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.most_tokens > longest:
        raise InputError(
            f"{options.base} has {longest} positions, answers have up to {options.most_tokens} tokens: "
            f"give --max-tokens {longest}"
        )
