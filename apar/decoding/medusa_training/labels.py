"""What each Medusa head should guess at each position of a tree sequence.

Receives a `TreeSequence`; hands on a table of labels. A head looks ahead along its own thread: behind [Fork] the thread
goes on with the sibling, and a detail, which begins with [Child], is a thread of its own. So a head learns what it
will be asked, whichever of the tree's paths a position stands on.
"""

import numpy as np
from numpy.typing import NDArray

from apar.training.sequences import IGNORED, TreeSequence

Int64s = NDArray[np.int64]


def head_labels(tree: TreeSequence, num_heads: int) -> Int64s:
    """Labels [1 + num_heads, T]: the token that follows each position on its thread, then the one behind that, and so
    on; `IGNORED` where the thread has ended, and at the prompt's tokens but its last."""
    following = next_on_thread(tree)
    there = following >= 0
    rows = [tree.labels.astype(np.int64)]
    for _ in range(num_heads):
        # A step further from here is a step from the next position. Prompts stay out: their own label is ignored.
        further = np.where(there & (rows[0] != IGNORED), rows[-1][np.maximum(following, 0)], IGNORED)
        rows.append(further)
    return np.stack(rows)


def next_on_thread(tree: TreeSequence) -> Int64s:
    """[T]: index of the token that a thread takes after each one, -1 at its end."""
    length = len(tree)
    following = np.arange(1, length + 1)
    firsts = np.searchsorted(tree.nodes, np.arange(len(tree.parents) + 1)).tolist()
    siblings = {
        parent: node
        for node, (parent, detail) in enumerate(zip(tree.parents.tolist(), tree.is_detail.tolist(), strict=True))
        if parent >= 0 and not detail
    }
    for node in range(len(tree.parents)):
        if firsts[node] == firsts[node + 1]:
            continue
        after = siblings.get(node)
        ends = after is None or firsts[after] == firsts[after + 1]  # a sibling without a token only ends
        following[firsts[node + 1] - 1] = -1 if ends else firsts[after]
    return following
