"""What an answer's threads have drafted so far, by the token it comes behind.

In: tries of tokens, merged in under a key token, by all threads of one answer. Out: the trie behind a key as a
candidate tree. A pool is made for one answer and never outlives it.

Source: PTD paper, section 3.1 (the merge M).
"""

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from apar.decoding.drafting import NO_PARENT

Trie: TypeAlias = "dict[int, Trie]"
"""The children of a node by token, the oldest first."""


class DraftPool:
    def __init__(self, nodes_per_key: int = 60) -> None:
        self.nodes_per_key = nodes_per_key
        """When a key holds more nodes than this, its oldest first-level child goes, with everything behind it."""
        self._tries: dict[int, Trie] = {}
        self._num_nodes: dict[int, int] = {}

    def merge(self, key: int, trie: Trie) -> None:
        """Add what `trie` has more than the key's own; `trie` may go on being used."""
        if not trie:
            return
        mine = self._tries.setdefault(key, {})
        num_nodes = self._num_nodes.get(key, 0) + merge(mine, trie)
        while num_nodes > self.nodes_per_key and len(mine) > 1:
            num_nodes -= count_nodes({(oldest := next(iter(mine))): mine.pop(oldest)})
        if num_nodes > self.nodes_per_key:
            # A single child is left. Without it the key would have nothing; its ends, the least sure, go instead.
            cut(mine, self.nodes_per_key)
            num_nodes = self.nodes_per_key
        self._num_nodes[key] = num_nodes

    def num_nodes(self, key: int) -> int:
        return self._num_nodes.get(key, 0)

    def candidates(self, key: int, max_nodes: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the key's trie: at most `max_nodes`, level by level, so parents before children."""
        token_ids: list[int] = []
        parents: list[int] = []
        for index, (parent, token_id, _) in enumerate(level_order(self._tries.get(key, {}))):
            if index == max_nodes:
                break
            token_ids.append(token_id)
            parents.append(parent)
        return token_ids, parents


def merge(mine: Trie, other: Trie) -> int:
    """M: what is missing in `mine` is copied with everything behind it. Returns the number of nodes it gained."""
    gained = 0
    pairs = [(mine, other)]
    while pairs:
        mine, other = pairs.pop()
        for token_id, children in other.items():
            if token_id not in mine:
                mine[token_id] = {}
                gained += 1
            if children:
                pairs.append((mine[token_id], children))
    return gained


def level_order(trie: Trie) -> Iterator[tuple[int, int, Trie]]:
    """All nodes, level by level: the parent's place in this order, the token, the children."""
    waiting: deque[tuple[int, Trie]] = deque([(NO_PARENT, trie)])
    index = 0
    while waiting:
        parent, children = waiting.popleft()
        for token_id, grandchildren in children.items():
            yield parent, token_id, grandchildren
            waiting.append((index, grandchildren))
            index += 1


def count_nodes(trie: Trie) -> int:
    return sum(1 for _ in level_order(trie))


def cut(trie: Trie, max_nodes: int) -> None:
    """Keep the first `max_nodes` nodes of the level order."""
    nodes = list(level_order(trie))
    levels = [trie, *(children for _, _, children in nodes)]
    # From the end on, so that every node's children are gone before it goes.
    for parent, token_id, _ in reversed(nodes[max_nodes:]):
        del levels[parent + 1][token_id]
