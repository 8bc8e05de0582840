"""The paragraph tree of a finished answer: spans of its text, and back again.

Receives where an answer splits into heads and details (`Split`); hands on `TreeNode`s, which tile the text in restored
order (node, first child, next sibling). A tree holds no text of its own, so restoring cannot change a byte.

Source: APAR paper, sections 3.4.1 (tree) and 3.4.6 (restoration).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from apar.errors import AparError


class TreeError(AparError):
    """Nodes that are no paragraph tree of the text they are given with."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A span [start, end) of the answer in code points; both pointers are set (the node forks) or neither."""

    start: int
    end: int
    first_child: int | None = None
    next_sibling: int | None = None


@dataclass(slots=True)
class Split:
    """One fork: the head ends at `head_end`, its detail at `detail_end`; `inner` are forks inside the detail."""

    head_end: int
    detail_end: int
    inner: "list[Split]" = field(default_factory=list)


def build(start: int, end: int, splits: Sequence[Split]) -> list[TreeNode]:
    """Make the tree of the span [start, end); splits must be in order and must not overlap.

    Everything between one detail's end and the next head's end is one node, the sibling; what follows the last detail
    is the last sibling, which may be empty. Node numbers are in restored order.
    """
    nodes: list[TreeNode] = []
    pending = [(start, end, splits, 0, -1)]  # (span, its splits, the first of them to use, whose next sibling it is)
    while pending:
        at, stop, within, index, elder = pending.pop()
        number = len(nodes)
        if elder >= 0:
            before = nodes[elder]
            nodes[elder] = TreeNode(before.start, before.end, before.first_child, number)
        if index == len(within):
            nodes.append(TreeNode(at, stop))
            continue
        split = within[index]
        nodes.append(TreeNode(at, split.head_end, number + 1))
        pending.append((split.detail_end, stop, within, index + 1, number))
        pending.append((split.head_end, split.detail_end, split.inner, 0, -1))
    return nodes


def restored_order(nodes: Sequence[TreeNode]) -> Iterator[int]:
    """Node numbers from the root on: node, first child, next sibling.

    Raises:
        TreeError: if a pointer leads nowhere, stands alone, or comes to a node twice.
    """
    if not nodes:
        raise TreeError("no nodes: a tree has at least its root")
    seen = [False] * len(nodes)
    pending = [0]
    while pending:
        number = pending.pop()
        if not 0 <= number < len(nodes):
            raise TreeError(f"a pointer leads to node {number}: there are {len(nodes)} nodes")
        if seen[number]:
            raise TreeError(f"node {number} is reached twice: give every node one parent")
        seen[number] = True
        yield number
        node = nodes[number]
        if (node.first_child is None) != (node.next_sibling is None):
            raise TreeError(f"node {number} has one pointer: give it both or neither")
        if node.first_child is not None and node.next_sibling is not None:
            pending += (node.next_sibling, node.first_child)
    if not all(seen):
        raise TreeError(f"node {seen.index(False)} is not reached from the root: remove it")


def restore(text: str, nodes: Sequence[TreeNode]) -> str:
    """The nodes' texts in restored order: the answer, for every tree that `verify` accepts."""
    return "".join(text[nodes[number].start : nodes[number].end] for number in restored_order(nodes))


def verify(text: str, nodes: Sequence[TreeNode]) -> None:
    """Check that the nodes are a paragraph tree which tiles the text, with no empty detail.

    Raises:
        TreeError: naming the first fault.
    """
    at = 0
    for number in restored_order(nodes):
        node = nodes[number]
        if node.start != at or node.end < node.start:
            raise TreeError(f"node {number} spans [{node.start}, {node.end}): restored order has come to {at}")
        at = node.end
        child = node.first_child
        if child is not None and nodes[child].first_child is None and nodes[child].start == nodes[child].end:
            raise TreeError(f"node {child}, a detail, is empty: leave node {number} unforked")
    if at != len(text):
        raise TreeError(f"the nodes end at {at}: the text has {len(text)} characters")


def longest_thread(nodes: Sequence[TreeNode]) -> int:
    """Characters on the longest path from the root to a leaf: what decoding must do one after the other."""
    longest = [0] * len(nodes)
    for number in range(len(nodes) - 1, -1, -1):  # numbers grow from parent to child
        node = nodes[number]
        longest[number] = node.end - node.start
        if node.first_child is not None and node.next_sibling is not None:
            longest[number] += max(longest[node.first_child], longest[node.next_sibling])
    return longest[0]


def attended_share(nodes: Sequence[TreeNode]) -> float:
    """Pairs of characters of which one sees the other on its path, as part of the plain text's; 1 without forks."""
    before = [0] * len(nodes)  # characters on the path up to the node
    pairs = 0
    for number, node in enumerate(nodes):  # numbers grow from parent to child
        length = node.end - node.start
        pairs += length * before[number] + length * (length - 1) // 2
        for pointed in (node.first_child, node.next_sibling):
            if pointed is not None:
                before[pointed] = before[number] + length
    total = sum(node.end - node.start for node in nodes)
    return 2 * pairs / (total * (total - 1)) if total > 1 else 1.0
