"""The paragraph tree of one request while it grows, and its restoration, token by token, in order.

Tokens come in by node, in any order between threads; they go out in restored order (node, first child, next sibling) as
soon as everything before them is known. Where the output ends (`max_tokens`, a stop token, a limit) is a place in that
order, never a moment in time: so what comes out does not depend on which thread ran when.

Source: APAR paper, sections 3.4.1 (tree), 3.4.5 (lines 23-29) and 3.4.6 (restoration).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    ROOT = "root"
    DETAIL = "detail"
    """Reached by its parent's `first_child`."""
    SIBLING = "sibling"
    """Reached by its parent's `next_sibling`."""


@dataclass(frozen=True, slots=True)
class End:
    """Why an output ends where it ends."""

    reason: str
    """`stop`, `length`, or what else ended the thread."""
    stop_token_id: int | str | None = None


STOP = End("stop")
LENGTH = End("length")


@dataclass(slots=True, eq=False)
class Node:
    """A paragraph node: what one thread wrote between two forks."""

    kind: Kind
    parent: "Node | None"
    thread: int
    """0 is the root thread; children count in order of creation."""
    before: int
    """Output tokens known, when the node was made, to come before it: a lower bound."""
    first_step: int | None = None
    last_step: int | None = None
    """Engine steps of its first and last token that went out; of its making while there are none."""
    num_tokens: int = 0
    num_emitted: int = 0
    pending: list[tuple[int, int, Any]] = field(default_factory=list)
    """Tokens that are known and not yet emitted: (token id, engine step, what travels along)."""
    closed: bool = False
    end: End | None = None
    """Set where the output must end behind this node's tokens."""
    first_child: "Node | None" = None
    next_sibling: "Node | None" = None


class Span(NamedTuple):
    """A node as it is reported: numbers in restored order, [start, end) in restored output tokens."""

    node: int
    parent: int | None
    kind: str
    thread: int
    start: int
    end: int
    first_step: int
    last_step: int


class ParagraphTree:
    """Grows by `append`, `fork` and `close`; gives tokens back through `emit`."""

    def __init__(self, max_tokens: int, max_forks: int) -> None:
        self.root = Node(Kind.ROOT, None, 0, 0)
        self.end: End | None = None
        """Set once everything there will ever be has been emitted."""
        self.num_emitted = 0
        self.num_tokens = 0
        """Output tokens of all nodes, emitted or not."""
        self.num_forks = 0
        self._max_tokens = max_tokens
        self._max_forks = max_forks
        self._cursor: Node | None = self.root
        self._behind: list[Node] = []
        """Siblings still to visit, the nearest last."""
        self._passed: list[Span] = []
        """Of the nodes that the cursor has left: nothing changes in them any more."""
        self._numbers: dict[Node, int] = {}
        """Of the same nodes."""
        self._forks_passed = 0
        self._ends = False
        """Whether some node got an end behind it since `prune` was called: no open node lies behind an older one."""

    def append(self, node: Node, token_id: int, step: int, extra: Any = None) -> None:
        assert not node.closed
        node.pending.append((token_id, step, extra))
        node.num_tokens += 1
        self.num_tokens += 1

    def extend(self, node: Node, token_ids: list[int], step: int) -> None:
        """Append plain tokens of one step, with nothing that travels along."""
        for token_id in token_ids:
            node.pending.append((token_id, step, None))
            node.num_tokens += 1
            self.num_tokens += 1

    def already_emitted(self, num_tokens: int, first_step: int | None, last_step: int | None) -> None:
        """Note root tokens that went out before the tree was kept; comes before everything else."""
        root = self.root
        root.num_tokens = root.num_emitted = self.num_tokens = self.num_emitted = num_tokens
        root.first_step, root.last_step = first_step, last_step

    def take_back(self, node: Node) -> None:
        """Drop the node's latest token: a thread's own EOS is no part of the answer."""
        assert node.pending
        assert not node.closed
        node.pending.pop()
        node.num_tokens -= 1
        self.num_tokens -= 1

    def fork(self, node: Node, child_thread: int, step: int) -> tuple[Node, Node]:
        """Close a node at its [Fork]; returns its detail, for the child thread, and its sibling, for the thread."""
        assert not node.closed
        node.closed = True
        if node.num_tokens == 0 and node.kind is Kind.ROOT:
            node.first_step = node.last_step = step
        before = node.before + node.num_tokens
        node.first_child = Node(Kind.DETAIL, node, child_thread, before, step, step)
        node.next_sibling = Node(Kind.SIBLING, node, node.thread, before, step, step)
        self.num_forks += 1
        return node.first_child, node.next_sibling

    def close(self, node: Node, end: End | None = None) -> None:
        """End a node's thread; with `end`, the output ends behind it too."""
        node.closed, node.end = True, end
        self._ends = self._ends or end is not None

    def in_order(self) -> Iterator[Node]:
        """All nodes, depth first: root, first child, next sibling (RESTORE, section 3.4.6)."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            if node.next_sibling is not None:
                stack.append(node.next_sibling)
            if node.first_child is not None:
                stack.append(node.first_child)

    @property
    def is_ready(self) -> bool:
        """Whether `emit` has anything to do: nothing that comes behind the cursor's node is known in order."""
        return self._cursor is not None and (bool(self._cursor.pending) or self._cursor.closed)

    def needs_pruning(self) -> bool:
        """Whether some open node may lie behind the end of the output."""
        return self._ends or self.num_tokens >= self._max_tokens or self.num_forks > self._max_forks

    def prune(self) -> list[Node]:
        """Close every open node that can add nothing to the output, and return those.

        These are the nodes behind an end that is known already, wherever the nodes before that end still stand.
        """
        pruned = []
        tokens = forks = 0
        ended = False
        for node in self.in_order():
            if not ended:
                tokens += node.num_tokens
                forks += node.first_child is not None
                if node.first_child is not None and forks > self._max_forks and node.end is None:
                    node.end = LENGTH
                ended = node.end is not None or tokens >= self._max_tokens
            if ended and not node.closed:
                self.close(node, LENGTH)
                pruned.append(node)
        self._ends = False
        return pruned

    def emit(self) -> list[tuple[int, Any]]:
        """The tokens that have become known in order since the last call; sets `end` with the last of them."""
        out: list[tuple[int, Any]] = []
        while self.end is None and self._cursor is not None:
            node = self._cursor
            if node.pending:
                room = self._max_tokens - self.num_emitted
                taken = node.pending[:room]
                del node.pending[:room]
                out.extend((token, extra) for token, _, extra in taken)
                if taken:
                    node.first_step = taken[0][1] if node.num_emitted == 0 else node.first_step
                    node.last_step = taken[-1][1]
                node.num_emitted += len(taken)
                self.num_emitted += len(taken)
            if node.pending or not node.closed:
                # More than fits, or more to come: with `max_tokens` out, more makes no difference.
                if self.num_emitted >= self._max_tokens:
                    self.end = LENGTH
                break
            self._forks_passed += node.first_child is not None
            if node.end is not None:
                self.end = node.end
            elif self._forks_passed > self._max_forks or (
                self.num_emitted >= self._max_tokens and (self._behind or node.first_child is not None)
            ):
                self.end = LENGTH
            else:
                self._advance(node)
        return out

    def spans(self) -> list[Span]:
        """The tree of what has been emitted so far; nodes behind that are not part of it.

        All but the last one are final: with stop strings a receipt goes out at every step.
        """
        return self._passed.copy() if self._cursor is None else [*self._passed, self._span(self._cursor)]

    def _span(self, node: Node) -> Span:
        """Of the cursor's node: all before it have been left."""
        parent = None if node.parent is None else self._numbers[node.parent]
        start = self._passed[-1].end if self._passed else 0
        first, last = node.first_step or 0, node.last_step or 0
        end = start + node.num_emitted
        return Span(len(self._passed), parent, node.kind.value, node.thread, start, end, first, last)

    def _advance(self, node: Node) -> None:
        self._numbers[node] = len(self._passed)
        self._passed.append(self._span(node))
        if node.next_sibling is not None:
            self._behind.append(node.next_sibling)
        self._cursor = node.first_child or (self._behind.pop() if self._behind else None)
        if self._cursor is None:
            self.end = STOP
