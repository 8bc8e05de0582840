"""What Medusa heads learn on trees: the tokens further on along each thread."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from synthetic_trees import CONTROL, random_nodes
from tiny_models import CHILD, EOS, FORK

from apar.decoding.medusa_training.labels import head_labels, next_on_thread
from apar.training.sequences import IGNORED, AnswerNode, TreeSequence, linearise

NONE = IGNORED

trees = st.builds(
    lambda seed, forks, complete: (
        lambda random: linearise([7, 8, 9], random_nodes(random, forks, 10, 90), CONTROL, EOS, complete=complete)
    )(Random(seed)),
    st.integers(0, 2**32),
    st.integers(0, 8),
    st.booleans(),
)


def test_heads_look_past_fork_to_the_sibling_and_in_a_detail_to_the_detail() -> None:
    nodes = [AnswerNode([20, 21], 1, 2), AnswerNode([30, 31]), AnswerNode([40])]
    tree = linearise([7, 8], nodes, CONTROL, EOS)
    assert tree.token_ids.tolist() == [7, 8, 20, 21, FORK, CHILD, 30, 31, 40]
    assert next_on_thread(tree).tolist() == [1, 2, 3, 4, 8, 6, 7, -1, -1]
    assert head_labels(tree, 2).tolist() == [
        [NONE, 20, 21, FORK, 40, 30, 31, EOS, EOS],
        [NONE, 21, FORK, 40, EOS, 31, EOS, NONE, NONE],
        [NONE, FORK, 40, EOS, NONE, EOS, NONE, NONE, NONE],
    ]


def test_behind_an_empty_sibling_there_is_only_the_end() -> None:
    tree = linearise([7], [AnswerNode([20], 1, 2), AnswerNode([30]), AnswerNode([])], CONTROL, EOS)
    assert tree.token_ids.tolist() == [7, 20, FORK, CHILD, 30]
    assert head_labels(tree, 1)[1].tolist() == [FORK, EOS, NONE, EOS, NONE]


@given(trees, st.integers(1, 4))
def test_on_every_path_a_threads_own_labels_are_those_of_the_path_as_plain_text(
    tree: TreeSequence, num_heads: int
) -> None:
    table = head_labels(tree, num_heads)
    seen = np.zeros(len(tree), int)
    for leaf in tree.leaves():
        path = tree.path(leaf)
        tokens = tree.token_ids[path].tolist()
        own = max((i for i, token in enumerate(tokens) if token == CHILD), default=0)
        plain = [*tokens[1:], int(tree.labels[path[-1]]), *[NONE] * num_heads]
        for i in range(own, len(path)):
            seen[path[i]] += 1
            takes_loss = tree.labels[path[i]] != IGNORED
            expected = plain[i : i + num_heads + 1] if takes_loss else [NONE] * (num_heads + 1)
            assert table[:, path[i]].tolist() == expected
    assert (seen == 1).all()
