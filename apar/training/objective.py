"""Next-token loss over the positions with labels only, without ever holding all their logits.

A row of 1,000 labels over 49,152 words would be 200 MB of float32 logits, several times over in autograd. Here they are
computed a chunk at a time, and their gradients at once, in the forward pass: the backward pass only hands those on.

Most labels are one token. A soft one is a distribution, the base's own; its loss is the divergence from that, which is
0 where the model says what the base says.

Shape suffixes: n labels, m of them soft, c of a chunk, s of those soft, d hidden, v vocabulary, r control rows,
k barred tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK = 256


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logits: a weight, and rows of it that are kept, and trained, apart."""

    weight_vd: Tensor
    """Frozen or trained, as it says itself. Trained ones are float32, and cast to `dtype` for the products."""
    rows_rd: Tensor | None
    """Take the place of the weight's rows `row_ids`; None: the weight has them."""
    row_ids: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """What the base says at some of the labels; computed to probabilities a chunk at a time."""

    soft_n: Tensor
    """bool [n]: which labels these are."""
    hidden_md: Tensor
    """The base's last hidden states there."""
    weight_vd: Tensor
    """The base's output embedding."""
    barred_mk: Tensor
    """int64 [m, k]: tokens that have no part in the target."""
    share: float
    """Of the base in each target; the rest is the label."""

    def chunk(self, start: int, labels_c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Which of the labels from `start` on are soft, bool [c], and their targets, float32 [s, v]."""
        soft_c = self.soft_n[start : start + len(labels_c)]
        first = int(self.soft_n[:start].sum())
        here = slice(first, first + int(soft_c.sum()))
        logits_sv = linear(self.hidden_md[here].to(dtype), self.weight_vd.to(dtype)).float()
        targets_sv = logits_sv.scatter_(1, self.barred_mk[here], -torch.inf).softmax(1).mul_(self.share)
        label_s1 = labels_c[soft_c, None]
        targets_sv.scatter_add_(1, label_s1, torch.full(label_s1.shape, 1 - self.share, device=label_s1.device))
        return soft_c, targets_sv


class _SummedLoss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        rows_rd: Tensor | None,
        row_ids: Any,
        labels_n: Tensor,
        dtype: torch.dtype,
        soft: SoftTargets | None,
    ) -> Tensor:
        weight = weight_vd.detach().to(dtype)
        rows = None if rows_rd is None else rows_rd.detach().to(dtype)
        needs_hidden, needs_weight, needs_rows = ctx.needs_input_grad[:3]
        hidden_grad_nd = torch.empty_like(hidden_nd) if needs_hidden else None
        weight_grad_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if needs_weight else None
        rows_grad_rd = torch.zeros_like(rows_rd, dtype=torch.float32) if rows_rd is not None and needs_rows else None
        losses = []
        for start in range(0, len(labels_n), CHUNK):
            here = slice(start, start + CHUNK)
            hidden_cd, labels_c = hidden_nd[here].detach().to(dtype), labels_n[here, None]
            logits_cv = _logits(hidden_cd, weight, rows, row_ids)
            logs_cv = logits_cv.sub_(logits_cv.logsumexp(1, keepdim=True))
            losses.append(-logs_cv.gather(1, labels_c).sum())
            soft_c = targets_sv = None
            if soft is not None:
                soft_c, targets_sv = soft.chunk(start, labels_c[:, 0], dtype)
                logs_sv = logs_cv[soft_c]
                losses.append(logs_sv.gather(1, labels_c[soft_c]).sum())  # which the divergence takes the place of
                losses.append(torch.xlogy(targets_sv, targets_sv).sub_(logs_sv.mul_(targets_sv)).sum())
            if not (needs_hidden or needs_weight or needs_rows):
                continue
            grad_cv = logs_cv.exp_()
            hard_c1 = torch.full_like(grad_cv[:, :1], -1.0)
            if soft_c is not None:
                hard_c1[soft_c] = 0.0
                grad_cv[soft_c] -= targets_sv
            grad_cv.scatter_add_(1, labels_c, hard_c1)
            grad_cv = grad_cv.to(dtype)
            grad_cr = None
            if rows is not None:
                grad_cr = grad_cv[:, row_ids].clone()
                grad_cv[:, row_ids] = 0.0
            if hidden_grad_nd is not None:
                hidden_grad_nd[here] = grad_cv @ weight
                if grad_cr is not None and rows is not None:
                    hidden_grad_nd[here] += grad_cr @ rows
            if weight_grad_vd is not None:
                weight_grad_vd += grad_cv.t() @ hidden_cd
            if rows_grad_rd is not None and grad_cr is not None:
                rows_grad_rd += grad_cr.t() @ hidden_cd
        ctx.grads = (hidden_grad_nd, weight_grad_vd, rows_grad_rd)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grads = tuple(None if g is None else g.mul_(grad) for g in ctx.grads)
        ctx.grads = None
        return (*grads, None, None, None, None)


def summed_loss(hidden_nd: Tensor, head: Head, labels_n: Tensor, soft: SoftTargets | None = None) -> Tensor:
    """Cross entropy, and divergence from soft targets, summed over the labels, float32 [].

    Everything outside the products is float32; `head.dtype` is that of the products.
    """
    summed: Tensor = _SummedLoss.apply(
        hidden_nd, head.weight_vd, head.rows_rd, head.row_ids, labels_n, head.dtype, soft
    )
    return summed


def label_and_token_probabilities(
    hidden_nd: Tensor, head: Head, labels_n: Tensor, token_id: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label [n], and probability of one token at each position [n]; both float32."""
    weight = head.weight_vd.detach().to(head.dtype)
    rows = None if head.rows_rd is None else head.rows_rd.detach().to(head.dtype)
    labels, tokens = [], []
    with torch.no_grad():
        for start in range(0, len(labels_n), CHUNK):
            here = slice(start, start + CHUNK)
            logits_cv = _logits(hidden_nd[here].to(head.dtype), weight, rows, head.row_ids)
            sums_c = logits_cv.logsumexp(1)
            labels.append(logits_cv.gather(1, labels_n[here, None])[:, 0] - sums_c)
            tokens.append((logits_cv[:, token_id] - sums_c).exp())
    return torch.cat(labels), torch.cat(tokens)


def _logits(hidden_cd: Tensor, weight: Tensor, rows: Tensor | None, row_ids: Any) -> Tensor:
    logits_cv = linear(hidden_cd, weight).float()
    if rows is not None:
        logits_cv[:, row_ids] = linear(hidden_cd, rows).float()
    return logits_cv
