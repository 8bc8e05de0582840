"""The chunked loss and its gradients are those of PyTorch's cross entropy over all logits at once."""

import pytest
import torch

from apar.training import objective
from apar.training.objective import Head, label_and_token_probabilities, summed_loss

N, D, V = 11, 8, 30
ROWS = torch.tensor([28, 5])


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, rows = (torch.randn(size, generator=generator) for size in ((N, D), (V, D), (2, D)))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[:3] = torch.tensor([28, 5, 28])
    return hidden, weight, rows, labels


@pytest.mark.parametrize("with_rows", [True, False])
def test_loss_and_gradients_equal_pytorchs(with_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", 4)
    hidden, weight, rows, labels = (t.requires_grad_() if t.is_floating_point() else t for t in tensors())
    head = Head(weight, rows, ROWS, torch.float32) if with_rows else Head(weight, None, None, torch.float32)
    ours = summed_loss(hidden, head, labels) / 7
    ours.backward()
    inputs = [hidden, weight, *([rows] if with_rows else [])]
    gradients = [tensor.grad.clone() for tensor in inputs if tensor.grad is not None]
    for tensor in inputs:
        tensor.grad = None
    whole = weight.index_copy(0, ROWS, rows) if with_rows else weight
    theirs = torch.nn.functional.cross_entropy(hidden @ whole.t(), labels, reduction="sum") / 7
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(gradient, tensor.grad, atol=1e-5, rtol=1e-4)


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, rows, labels = tensors()
    rows.requires_grad_()
    summed_loss(hidden.requires_grad_(), Head(weight, rows, ROWS, torch.float32), labels).backward()
    assert weight.grad is None
    assert rows.grad is not None
    assert rows.grad.abs().sum() > 0


def test_probabilities_are_those_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", 4)
    hidden, weight, rows, labels = tensors()
    logs, token = label_and_token_probabilities(hidden, Head(weight, rows, ROWS, torch.float32), labels, 28)
    expected = (hidden @ weight.index_copy(0, ROWS, rows).t()).softmax(1)
    torch.testing.assert_close(logs.exp(), expected.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(token, expected[:, 28])
