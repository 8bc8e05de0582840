"""Several trees in one row, which cannot see one another.

Receives `TreeSequence`s; hands on `Row`s, and the attention mask of a row in the two forms that attention wants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apar.training.sequences import Bools, Int32s, TreeSequence


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Trees one behind the other. Shapes: T tokens of the row, N nodes of all its trees."""

    trees: Sequence[TreeSequence]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.trees))

    @property
    def num_labels(self) -> int:
        return sum(tree.num_labels for tree in self.trees)

    def tensors(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and labels, int64 [1, T]."""
        parts = (
            [tree.token_ids for tree in self.trees],
            [tree.positions for tree in self.trees],
            [tree.labels for tree in self.trees],
        )
        token_ids, positions, labels = (
            torch.from_numpy(np.concatenate(part).astype(np.int64))[None].to(device) for part in parts
        )
        return token_ids, positions, labels

    def spans(self) -> list[tuple[int, int]]:
        """Where each tree stands: [start, end) in tokens of the row."""
        ends = np.cumsum([len(tree) for tree in self.trees]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def nodes_and_ancestors(self) -> tuple[Int32s, Bools]:
        """Each token's node [T], numbered through the row, and the trees' tables of ancestors in one [N, N]."""
        sizes = [len(tree.parents) for tree in self.trees]
        table = np.zeros((sum(sizes), sum(sizes)), np.bool_)
        nodes, first = [], 0
        for tree, size in zip(self.trees, sizes, strict=True):
            table[first : first + size, first : first + size] = tree.ancestors()
            nodes.append(tree.nodes + first)
            first += size
        return np.concatenate(nodes), table


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each length, longest first, into the first row with room; returns the indices in each row.

    Raises:
        ValueError: a length is above the capacity.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sequence has {length} tokens, a row holds {capacity}")
        place = next((row for row, left in enumerate(room) if left >= length), None)
        if place is None:
            rows.append([index])
            room.append(capacity - length)
        else:
            rows[place].append(index)
            room[place] -= length
    return rows


def pack(trees: Sequence[TreeSequence], row_tokens: int) -> list[Row]:
    return [Row([trees[i] for i in row]) for row in first_fit([len(tree) for tree in trees], row_tokens)]


def tree_mask(tree: TreeSequence) -> Bools:
    """[T, T]: whether the first token sees the second: it stands before it on its path, or is itself."""
    seen = tree.ancestors()[tree.nodes[:, None], tree.nodes[None, :]]
    return np.tril(seen)


def dense_mask(row: Row) -> Tensor:
    """bool [1, 1, T, T], as SDPA takes it for a whole row."""
    mask = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.bool)
    for tree, (start, end) in zip(row.trees, row.spans(), strict=True):
        mask[start:end, start:end] = torch.from_numpy(tree_mask(tree))
    return mask[None, None]


def mask_mod(row: Row, device: torch.device | str = "cpu") -> Callable[[Any, Any, Any, Any], Tensor]:
    """The same mask as a function of (batch, head, query, key), as FlexAttention takes it."""
    nodes, table = row.nodes_and_ancestors()
    nodes_t = torch.from_numpy(nodes.astype(np.int64)).to(device)
    table_nn = torch.from_numpy(table).to(device)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return table_nn[nodes_t[query], nodes_t[key]] & (query >= key)

    return sees


def block_mask(row: Row, device: torch.device | str) -> Any:
    """FlexAttention's `BlockMask`: blocks that no token sees are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    length = row.num_tokens
    return create_block_mask(mask_mod(row, device), B=None, H=None, Q_LEN=length, KV_LEN=length, device=device)
