"""What the base itself would say next, at the positions of a tree where that is the question.

Receives `TreeSequence`s; hands on the plain sequences that the base reads, without control tokens, and which labels of
a tree have the base's distribution for a target. A model that learns this keeps its base's words and learns to fork.

Nodes are tokenised once and stand in restored order, so a tree without its control tokens *is* the plain answer: the
base's token at a position and the tree's are the same one, and no text is tokenised twice.

Not asked of the base is what it cannot know: [Fork], where a thread ends, and the first token of a detail or sibling,
which stands behind a control token. Where an answer divides is the data's matter, the words are the base's.

Shape suffixes: t tokens of a tree, n labels, m of them soft, k barred tokens.
"""

import numpy as np
import torch

from apar.options import ControlTokens
from apar.training.packing import Row
from apar.training.sequences import IGNORED, Bools, TreeSequence


def soft_labels(tree: TreeSequence, control: ControlTokens, eos_token_id: int) -> Bools:
    """[t]: whether the label is one that the base predicts from the same token: text behind text.

    EOS is one where the answer itself ends outside every detail.
    """
    text_t = _is_text(tree, control)
    soft_t: Bools = text_t & ~np.isin(tree.labels, (IGNORED, control.fork, eos_token_id))
    soft_t[-1] = text_t[-1] and tree.labels[-1] != IGNORED and not _in_detail(tree)[tree.nodes[-1]]
    return soft_t


def plain_row(row: Row, control: ControlTokens, eos_token_id: int) -> Row:
    """The row's answers as the base reads them, with labels at the soft positions only, in the same order."""
    return Row([_plain(tree, control, eos_token_id) for tree in row.trees])


def soft_and_barred(row: Row, control: ControlTokens, eos_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the row's labels are soft, bool [n], and the tokens that have no part in their targets, int64 [m, k].

    Those are the control tokens, and inside a detail what would end it there, where the data does not: EOS, and the
    first tokens of the answer's siblings, unless the label is one. Otherwise the base's wish for the next paragraph
    would teach a detail to run on into it. A token may be listed twice.
    """
    soft_n: list[Bools] = []
    barred_m: list[list[int]] = []
    for tree in row.trees:
        soft_t = soft_labels(tree, control, eos_token_id)
        soft_n.append(soft_t[tree.labels != IGNORED])
        ends, in_detail = [eos_token_id, *_first_tokens(tree, control)], _in_detail(tree)
        for node, label in zip(tree.nodes[soft_t].tolist(), tree.labels[soft_t].tolist(), strict=True):
            barred_m.append(ends if in_detail[node] and label not in ends else [])
    width = max(map(len, barred_m), default=0)
    filled = [[control.fork, control.child, *barred, *[control.fork] * (width - len(barred))] for barred in barred_m]
    return torch.from_numpy(np.concatenate(soft_n)), torch.tensor(filled, dtype=torch.int64).reshape(-1, width + 2)


def _plain(tree: TreeSequence, control: ControlTokens, eos_token_id: int) -> TreeSequence:
    text_t = _is_text(tree, control)
    labels_t = np.where(soft_labels(tree, control, eos_token_id), tree.labels, IGNORED).astype(np.int32)
    length = int(text_t.sum())
    return TreeSequence(
        tree.token_ids[text_t],
        np.arange(length, dtype=np.int32),
        labels_t[text_t],
        np.zeros(length, np.int32),
        np.array([-1], np.int32),
        np.array([False]),
    )


def _is_text(tree: TreeSequence, control: ControlTokens) -> Bools:
    is_text: Bools = ~np.isin(tree.token_ids, (control.fork, control.child))
    return is_text


def _in_detail(tree: TreeSequence) -> Bools:
    """[N]: whether a node belongs to another thread than the root's."""
    within = tree.is_detail.copy()
    for node, parent in enumerate(tree.parents.tolist()):
        within[node] |= parent >= 0 and within[parent]  # parents come first
    return within


def _first_tokens(tree: TreeSequence, control: ControlTokens) -> list[int]:
    """What the siblings with text begin with, ascending."""
    _, firsts = np.unique(tree.nodes, return_index=True)
    begins = {
        int(tree.token_ids[first])
        for first in firsts.tolist()
        if tree.parents[tree.nodes[first]] >= 0 and not tree.is_detail[tree.nodes[first]]
    }
    return sorted(begins - {control.fork, control.child})
