"""One answer's paragraph tree as one training sequence: tokens in restored order, positions along each path.

Receives token ids of a prompt and of the tree's nodes; hands on a `TreeSequence`, which with the tree mask computes
what one plain causal sequence per root-to-leaf path would compute, each token once.

How control tokens stand in it: a node that forks ends with [Fork], its detail begins with [Child], its sibling goes on
after [Fork]. EOS ends every leaf, but only as a label: as an input nothing would ever see it.

Source: APAR paper, sections 3.4.2 ([Child] is attended to, but never a label) and 3.4.4 (attention, objective).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apar.options import ControlTokens

IGNORED = -100
"""Label of a position that takes no loss; PyTorch's own."""

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AnswerNode:
    """A node's own text as tokens, and the numbers of the nodes it points to: both or neither."""

    token_ids: Sequence[int]
    first_child: int | None = None
    next_sibling: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TreeSequence:
    """Shapes: T tokens, N nodes."""

    token_ids: Int32s
    """[T]"""
    positions: Int32s
    """[T]: how many tokens stand before this one on its path."""
    labels: Int32s
    """[T]: the token that follows on the path, or `IGNORED`."""
    nodes: Int32s
    """[T]: number of the token's node; ascending."""
    parents: Int32s
    """[N]: number of the node before it on the path, -1 for the root. Nodes are numbered in restored order."""
    is_detail: Bools
    """[N]: whether it begins with [Child]."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED).sum())

    @property
    def is_structured(self) -> bool:
        return len(self.parents) > 1

    @property
    def depth(self) -> int:
        """Most details that one path goes through."""
        depths: list[int] = []
        for parent, detail in zip(self.parents.tolist(), self.is_detail.tolist(), strict=True):
            depths.append((depths[parent] if parent >= 0 else 0) + detail)
        return max(depths)

    def ancestors(self) -> Bools:
        """[N, N]: whether the second node is the first one, or stands before it on its path."""
        table = np.eye(len(self.parents), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:  # parents come first
                table[node] |= table[parent]
        return table

    def leaves(self) -> list[int]:
        """The nodes that end a path."""
        return sorted(set(range(len(self.parents))) - set(self.parents.tolist()))

    def path(self, node: int) -> Int32s:
        """Indices of the tokens on the path from the root to the node's end: what a thread sees."""
        indices: Int32s = np.flatnonzero(self.ancestors()[node][self.nodes]).astype(np.int32)
        return indices

    def num_path_tokens(self) -> int:
        """Tokens that one plain sequence per root-to-leaf path would take."""
        per_node = np.bincount(self.nodes, minlength=len(self.parents))
        return int(sum(per_node[self.ancestors()[leaf]].sum() for leaf in self.leaves()))


def linearise(
    prompt_ids: Sequence[int],
    nodes: Sequence[AnswerNode],
    control: ControlTokens,
    eos_token_id: int,
    *,
    complete: bool = True,
) -> TreeSequence:
    """Lay out a tree in restored order (node, first child, next sibling).

    Args:
        prompt_ids: at least one token; only the last one takes loss, for the answer's first token.
        nodes: `nodes[0]` is the root.
        complete: False for an answer that was cut. No leaf that ends where the answer ends takes EOS for a label then:
            there the model would learn to stop where it did not.

    Raises:
        ValueError: no prompt, no nodes, or pointers that make no tree.
    """
    if not prompt_ids:
        raise ValueError("the prompt has no tokens: the first token of the answer needs one to follow")
    order = _restored_order(nodes)
    last_text = max((i for i, (node, _, _) in enumerate(order) if nodes[node].token_ids), default=0)
    token_ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    token_nodes: list[int] = []
    ends: list[int] = []  # per node: path length at its end
    last_tokens: list[int] = []  # per node: index of the path's last token at its end
    for number, (node, parent, is_detail) in enumerate(order):
        text = list(nodes[node].token_ids)
        forks = nodes[node].first_child is not None
        lead = list(prompt_ids) if parent < 0 else [control.child] if is_detail else []
        inputs = [*lead, *text, *([control.fork] if forks else [])]
        cut = not complete and number >= last_text
        targets = [*text, control.fork if forks else IGNORED if cut else eos_token_id]
        start = ends[parent] if parent >= 0 else 0
        first = len(token_ids)
        token_ids += inputs
        positions += range(start, start + len(inputs))
        labels += [IGNORED] * len(inputs)
        token_nodes += [number] * len(inputs)
        # What predicts the node's first token: the prompt's end, [Child], or the parent's [Fork].
        before = first + len(lead) - 1 if lead else last_tokens[parent]
        labels[before] = targets[0]
        here = first + len(lead)
        labels[here : here + len(text)] = targets[1:]
        ends.append(start + len(inputs))
        last_tokens.append(first + len(inputs) - 1 if inputs else last_tokens[parent])
    return TreeSequence(
        np.array(token_ids, np.int32),
        np.array(positions, np.int32),
        np.array(labels, np.int32),
        np.array(token_nodes, np.int32),
        np.array([parent for _, parent, _ in order], np.int32),
        np.array([detail for _, _, detail in order], np.bool_),
    )


def _restored_order(nodes: Sequence[AnswerNode]) -> list[tuple[int, int, bool]]:
    """Per node in restored order: its number in `nodes`, its parent's place in this order, whether it is a detail."""
    if not nodes:
        raise ValueError("the answer has no nodes: the first is the root")
    order: list[tuple[int, int, bool]] = []
    seen: set[int] = set()
    stack = [(0, -1, False)]
    while stack:
        node, parent, is_detail = stack.pop()
        if not 0 <= node < len(nodes) or node in seen:
            raise ValueError(f"node {node} is pointed to twice, or is none of {len(nodes)} nodes: this is no tree")
        seen.add(node)
        here = len(order)
        order.append((node, parent, is_detail))
        child, sibling = nodes[node].first_child, nodes[node].next_sibling
        if (child is None) != (sibling is None):
            raise ValueError(f"node {node} has one pointer: first_child and next_sibling go together")
        if child is not None and sibling is not None:
            stack += [(sibling, here, False), (child, here, True)]
    if len(seen) != len(nodes):
        missing = min(set(range(len(nodes))) - seen)
        raise ValueError(f"node {missing} cannot be reached from the root")
    return order
