"""Distillation: which labels the base is asked for, from which of its positions, and what that does to the loss."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from synthetic_trees import CONTROL, list_row, make_base, plain_row, random_nodes, write_rows
from tiny_models import EOS

from apar.options import ControlTokens
from apar.training import objective
from apar.training.data import load
from apar.training.distillation import plain_row as as_plain_row
from apar.training.distillation import soft_and_barred, soft_labels
from apar.training.model import TrainedModel
from apar.training.objective import Head, SoftTargets, summed_loss
from apar.training.options import TrainingOptions
from apar.training.packing import Row
from apar.training.sequences import IGNORED, AnswerNode, TreeSequence, linearise
from apar.training.vocabulary import Vocabulary

FORK, CHILD = CONTROL.fork, CONTROL.child
NEWLINE = 90


def two_points(*, complete: bool = True, tail: list[int] | None = None) -> TreeSequence:
    nodes = [
        AnswerNode([10, 11], 1, 2),
        AnswerNode([12, 13]),
        AnswerNode([NEWLINE, 14], 3, 4),
        AnswerNode([15, 16]),
        AnswerNode([NEWLINE, 17] if tail is None else tail),
    ]
    return linearise([7, 8], nodes, CONTROL, EOS, complete=complete)


def soft_pairs(tree: TreeSequence) -> list[tuple[int, int]]:
    soft = soft_labels(tree, CONTROL, EOS)
    return list(zip(tree.token_ids[soft].tolist(), tree.labels[soft].tolist(), strict=True))


def test_text_behind_text_is_soft_and_control_tokens_and_ends_of_details_are_not() -> None:
    assert soft_pairs(two_points()) == [(8, 10), (10, 11), (12, 13), (NEWLINE, 14), (15, 16), (NEWLINE, 17), (17, EOS)]


def test_the_end_of_a_detail_is_not_soft_even_where_the_answer_ends_with_it() -> None:
    assert soft_pairs(two_points(tail=[]))[-1] == (15, 16)
    assert soft_pairs(two_points(complete=False))[-1] == (NEWLINE, 17)


def barred(tree: TreeSequence) -> list[set[int]]:
    return [set(tokens) - {FORK, CHILD} for tokens in soft_and_barred(Row([tree]), CONTROL, EOS)[1].tolist()]


def test_in_details_neither_the_end_nor_what_siblings_begin_with_is_in_the_target() -> None:
    ends = {EOS, NEWLINE}
    assert barred(two_points()) == [set(), set(), ends, set(), ends, set(), set()]
    _, tokens = soft_and_barred(Row([two_points()]), CONTROL, EOS)
    assert all({FORK, CHILD} <= set(row) for row in tokens.tolist())


def test_a_detail_that_goes_on_in_a_new_line_is_let_do_so() -> None:
    nodes = [AnswerNode([10], 1, 2), AnswerNode([12, NEWLINE, 13]), AnswerNode([NEWLINE, 14])]
    tree = linearise([7], nodes, CONTROL, EOS)
    assert barred(tree) == [set(), set(), {EOS, NEWLINE}, set(), set()]


@pytest.mark.parametrize("seed", range(20))
def test_the_base_is_asked_for_the_same_labels_at_the_same_tokens_in_restored_order(seed: int) -> None:
    random = Random(seed)
    trees = [linearise([5, 6], random_nodes(random, random.randint(0, 6), 5, 100), CONTROL, EOS) for _ in range(3)]
    row = Row(trees)
    plain = as_plain_row(row, CONTROL, EOS)
    for tree, one in zip(trees, plain.trees, strict=True):
        soft = soft_labels(tree, CONTROL, EOS)
        at = one.labels != IGNORED
        assert one.token_ids.tolist() == [t for t in tree.token_ids.tolist() if t not in (FORK, CHILD)]
        assert one.labels[at].tolist() == tree.labels[soft].tolist()
        assert one.token_ids[at].tolist() == tree.token_ids[soft].tolist()
        followed = np.append(one.token_ids[1:], EOS)
        assert one.labels[at].tolist() == followed[at].tolist()
    soft_n, barred_mk = soft_and_barred(row, CONTROL, EOS)
    assert len(soft_n) == row.num_labels
    assert int(soft_n.sum()) == plain.num_labels == len(barred_mk)


# --- the loss ---

N, M, D, V = 11, 6, 8, 30


def soft_targets(share: float) -> SoftTargets:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(size, generator=generator) for size in ((M, D), (V, D)))
    soft = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]).bool()
    barred_mk = torch.tensor([[28, 5, 28], [28, 5, 9], [28, 5, 1], [28, 5, 5], [28, 5, 5], [28, 5, 5]])
    return SoftTargets(soft, hidden, weight, barred_mk, share)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_loss_is_the_divergence_from_the_base_and_its_gradient(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, rows = (
        torch.randn(size, generator=generator).requires_grad_() for size in ((N, D), (V, D), (2, D))
    )
    ids = torch.tensor([28, 5])
    labels = torch.randint(6, 28, (N,), generator=generator)
    soft = soft_targets(share)
    ours = summed_loss(hidden, Head(weight, rows, ids, torch.float32), labels, soft)
    ours.backward()
    gradients = [tensor.grad.clone() for tensor in (hidden, rows) if tensor.grad is not None]
    for tensor in (hidden, weight, rows):
        tensor.grad = None

    logits = soft.hidden_md @ soft.weight_vd.t()
    logits[:, ids] = -torch.inf
    logits[1, 9] = logits[2, 1] = -torch.inf
    base = logits.softmax(1)
    targets = torch.nn.functional.one_hot(labels, V).float()
    targets[soft.soft_n] = share * base + (1 - share) * targets[soft.soft_n]
    logs = (hidden @ weight.index_copy(0, ids, rows).t()).log_softmax(1)
    theirs = torch.nn.functional.kl_div(logs, targets, reduction="sum")
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    for gradient, tensor in zip(gradients, (hidden, rows), strict=True):
        torch.testing.assert_close(gradient, tensor.grad, atol=1e-5, rtol=1e-4)


# --- the model ---


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    make_base(folder / "base", tied=True)
    make_base(folder / "untied")
    rows = [plain_row("say ab", "cd ef gh ij kl."), list_row("list ab", ["ab", "cd", "ef"], ["gh ij", "kl ab", "cd"])]
    write_rows(folder / "data.parquet", rows)
    return folder


def model_and_trees(
    files: Path, method: str, **more: Any
) -> tuple[TrainedModel, TreeSequence, TreeSequence, ControlTokens]:
    defaults: dict[str, Any] = {"lora_rank": 4, "dtype": "fp32", "row_tokens": 256, "eval_share": 0.0, "distill": 1.0}
    defaults |= {"base": files / "base", "data": files / "data.parquet", "out": files / "out", "method": method}
    options = TrainingOptions(**{**defaults, **more})
    vocabulary = Vocabulary(options.base)
    data = load(options, vocabulary)
    torch.manual_seed(0)
    model = TrainedModel(options, vocabulary, torch.device("cpu"))
    return model, data.unstructured[0], data.structured[0], vocabulary.control


def gradient_norm(model: TrainedModel, tree: TreeSequence) -> float:
    for parameter in model.parameters():
        parameter.grad = None
    model.loss(Row([tree])).backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize(("method", "base"), [("lora", "base"), ("lora", "untied"), ("full", "base")])
def test_an_answer_that_does_not_fork_teaches_a_fresh_model_only_that_control_tokens_are_not_due(
    files: Path, method: str, base: str
) -> None:
    model, plain, tree, control = model_and_trees(files, method, base=files / base)
    at = torch.from_numpy(plain.labels != IGNORED)
    probabilities = model.logits(Row([plain]))[at].softmax(1)
    spent = -(1 - probabilities[:, [control.fork, control.child]].sum(1)).log().sum()
    assert model.loss(Row([plain])).item() == pytest.approx(float(spent), abs=1e-4)
    hard, _, _, _ = model_and_trees(files, method, base=files / base, distill=0.0)
    assert gradient_norm(model, plain) < 0.1 * gradient_norm(hard, plain)
    assert gradient_norm(model, tree) > 0.3 * gradient_norm(hard, tree)  # [Fork] and ends stay what they were


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_target_stays_the_bases_while_the_model_moves(files: Path, method: str) -> None:
    model, plain, _, _ = model_and_trees(files, method)
    before = model.loss(Row([plain])).item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    moved = model.loss(Row([plain])).item()
    assert moved > before + 0.1
    optimizer = torch.optim.AdamW(model.groups(2e-3, 0.0), lr=2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(Row([plain])).backward()
        optimizer.step()
    assert model.loss(Row([plain])).item() < 0.2 * moved
