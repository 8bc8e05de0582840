"""PTD's drafting tree: guesses of what comes next, which the model itself extends, a token per node and forward.

In: after every forward, the model's prediction behind each node. Out: the tree as tokens and parents.

The root children stand in a line: the k-th also sees those before it, and its subtree hangs at its place in the line.
So in terms of attention each is the next one's parent; its own children are those of its subtree.

Source: PTD paper, section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from apar.decoding.draft_pool import Trie
from apar.decoding.drafting import NO_PARENT


@dataclass(slots=True, eq=False)
class DraftNode:
    token_id: int
    children: "dict[int, DraftNode]" = field(default_factory=dict)
    """By token, the earliest first."""


class DraftingTree:
    def __init__(self, width: int, depth: int, max_nodes: int, eos_token_ids: frozenset[int]) -> None:
        self._width = width
        self._depth = depth
        self._max_nodes = max_nodes
        self._eos_token_ids = eos_token_ids
        self._line: dict[int, DraftNode] = {}
        """Root children by token, in the order of the line."""
        self.has_stepped = False
        """Whether a subtree has come to its full depth, or to the node cap."""

    def seed(self, chains: Sequence[Sequence[int]]) -> None:
        """A root child with a chain of children for each of `chains`, whose first tokens differ."""
        self._line = {}
        for chain in chains:
            node = None
            for token_id in reversed(chain):
                node = DraftNode(token_id, {} if node is None else {node.token_id: node})
            assert node is not None
            self._line[node.token_id] = node

    def nodes(self) -> tuple[list[DraftNode], list[int]]:
        """All nodes, level by level from the line on, and each one's parent in terms of attention."""
        nodes = list(self._line.values())
        parents = list(range(NO_PARENT, len(nodes) - 1))
        for index, node in enumerate(nodes):  # grows while it runs
            nodes.extend(node.children.values())
            parents.extend([index] * len(node.children))
        return nodes, parents

    def tries(self, predictions: Sequence[int]) -> list[tuple[int, Trie]]:
        """Per node of `nodes`, its token and the subtree behind it with the predictions in it.

        They share parts, so they are for reading.
        """
        nodes, _ = self.nodes()
        tries: dict[DraftNode, Trie] = {}
        for node, prediction in zip(reversed(nodes), reversed(predictions), strict=True):
            tries[node] = {token_id: tries[child] for token_id, child in node.children.items()}
            tries[node].setdefault(prediction, {})
        return [(node.token_id, tries[node]) for node in nodes]

    def grow(self, predictions: Sequence[int], next_token: int) -> None:
        """One forward's growth. `predictions` are by `nodes`; `next_token` is what came behind the path."""
        nodes, _ = self.nodes()
        with_eos = self._expand(nodes, predictions)
        self._lengthen(dict(zip(nodes, predictions, strict=True)), next_token)
        for root in list(self._line.values()):
            if _height(root) >= self._depth:
                self._step(root)
        self._line = {token_id: root for token_id, root in self._line.items() if not with_eos & set(_subtree(root))}
        self._fit()

    def _expand(self, nodes: Sequence[DraftNode], predictions: Sequence[int]) -> set[DraftNode]:
        """Give every node its prediction as a child. Returns the nodes that EOS came behind: those have no future."""
        with_eos = set()
        for node, prediction in zip(nodes, predictions, strict=True):
            if prediction in self._eos_token_ids:
                with_eos.add(node)
            elif prediction not in node.children and len(node.children) < self._width:
                node.children[prediction] = DraftNode(prediction)
        return with_eos

    def _lengthen(self, predictions: dict[DraftNode, int], next_token: int) -> None:
        """While the line is short, the prediction behind its end moves into it, with what hangs from there."""
        if len(self._line) >= self._width:
            return
        last = next(reversed(self._line.values()), None)
        token_id = predictions[last] if last else next_token
        if token_id in self._line or token_id in self._eos_token_ids:
            return
        if last is None:
            self._line[token_id] = DraftNode(token_id)
        elif token_id in last.children:  # not where the end has w other children
            self._line[token_id] = last.children.pop(token_id)

    def _step(self, root: DraftNode) -> None:
        """Depth control: a subtree goes on from its root's earliest child, which takes the root's place in the line."""
        self.has_stepped = True
        earliest = next(iter(root.children.values()), None)
        others = {token_id: node for token_id, node in self._line.items() if node is not root}
        if earliest is None or earliest.token_id in others:
            self._line = others
        else:
            line = [earliest if node is root else node for node in self._line.values()]
            self._line = {node.token_id: node for node in line}

    def _fit(self) -> None:
        """Node cap: the largest subtree steps before its time.

        Were growth stopped instead, no subtree might ever become high enough to step: the tree would stay as it is.
        """
        sizes = {root: len(_subtree(root)) for root in self._line.values()}
        while sum(sizes.values()) > self._max_nodes:
            self._step(max(sizes, key=lambda root: sizes[root]))
            sizes = {root: len(_subtree(root)) for root in self._line.values()}


def _subtree(root: DraftNode) -> list[DraftNode]:
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _height(root: DraftNode) -> int:
    """Edges down to the lowest node."""
    height = -1
    level = [root]
    while level:
        height += 1
        level = [child for node in level for child in node.children.values()]
    return height
