"""Trees as sequences: what stands where, what is a label, who sees whom."""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_trees import CONTROL, random_nodes
from tiny_models import CHILD, EOS, FORK

from apar.training.packing import Row, dense_mask, first_fit, mask_mod, pack, tree_mask
from apar.training.sequences import IGNORED, AnswerNode, TreeSequence, linearise

trees = st.builds(
    lambda seed, forks, complete: (
        lambda random: linearise([7, 8, 9], random_nodes(random, forks, 10, 90), CONTROL, EOS, complete=complete)
    )(Random(seed)),
    st.integers(0, 2**32),
    st.integers(0, 8),
    st.booleans(),
)


def simple() -> TreeSequence:
    """prompt 7 8 | 20 21 [Fork] → detail 30 31, sibling 40 (leaf)."""
    nodes = [AnswerNode([20, 21], 1, 2), AnswerNode([30, 31]), AnswerNode([40])]
    return linearise([7, 8], nodes, CONTROL, EOS)


def test_a_tree_is_laid_out_in_restored_order_with_positions_along_each_path() -> None:
    tree = simple()
    assert tree.token_ids.tolist() == [7, 8, 20, 21, FORK, CHILD, 30, 31, 40]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5]
    assert tree.nodes.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 0]


def test_loss_is_taken_on_everything_but_the_prompt_and_child() -> None:
    assert simple().labels.tolist() == [IGNORED, 20, 21, FORK, 40, 30, 31, EOS, EOS]


def test_behind_an_empty_sibling_fork_is_followed_by_eos() -> None:
    tree = linearise([7], [AnswerNode([20], 1, 2), AnswerNode([30]), AnswerNode([])], CONTROL, EOS)
    assert tree.token_ids.tolist() == [7, 20, FORK, CHILD, 30]
    assert tree.labels.tolist() == [20, FORK, EOS, 30, EOS]


def test_a_cut_answer_does_not_teach_to_stop_where_it_was_cut() -> None:
    nodes = [AnswerNode([20], 1, 2), AnswerNode([30]), AnswerNode([40], 3, 4), AnswerNode([50]), AnswerNode([])]
    cut = linearise([7], nodes, CONTROL, EOS, complete=False)
    assert cut.token_ids.tolist() == [7, 20, FORK, CHILD, 30, 40, FORK, CHILD, 50]
    assert cut.labels.tolist() == [20, FORK, 40, 30, EOS, FORK, IGNORED, 50, IGNORED]


@given(trees)
def test_on_every_path_each_label_is_the_next_token_of_the_path(tree: TreeSequence) -> None:
    for leaf in tree.leaves():
        path = tree.path(leaf)
        assert tree.positions[path].tolist() == list(range(len(path)))
        for here, there in itertools.pairwise(path):
            if tree.token_ids[there] == CHILD:
                assert tree.token_ids[here] == FORK
            elif there > 2:
                assert tree.labels[here] == tree.token_ids[there]
            else:
                assert tree.labels[here] == IGNORED
        assert tree.labels[path[-1]] in (EOS, IGNORED) or tree.token_ids[path[-1]] == FORK
    assert CHILD not in tree.labels


@given(trees)
def test_a_token_sees_its_path_and_nothing_else(tree: TreeSequence) -> None:
    mask = tree_mask(tree)
    for token in range(len(tree)):
        path = tree.path(int(tree.nodes[token]))
        assert np.flatnonzero(mask[token]).tolist() == [i for i in path.tolist() if i <= token]


@given(trees)
def test_path_tokens_are_those_of_all_paths(tree: TreeSequence) -> None:
    assert tree.num_path_tokens() == sum(len(tree.path(leaf)) for leaf in tree.leaves())


@given(st.lists(trees, min_size=1, max_size=4))
def test_a_rows_mask_is_its_trees_masks_and_nothing_between_them(packed: list[TreeSequence]) -> None:
    row = Row(packed)
    mask = dense_mask(row)[0, 0].numpy()
    for tree, (start, end) in zip(packed, row.spans(), strict=True):
        assert (mask[start:end, start:end] == tree_mask(tree)).all()
    assert mask.sum() == sum(tree_mask(tree).sum() for tree in packed)


@given(st.lists(trees, min_size=1, max_size=3))
def test_flex_attentions_mask_function_says_the_same_as_the_dense_mask(packed: list[TreeSequence]) -> None:
    row = Row(packed)
    sees, everywhere = mask_mod(row), torch.arange(row.num_tokens)
    assert torch.equal(sees(0, 0, everywhere[:, None], everywhere[None, :]), dense_mask(row)[0, 0])


@given(st.lists(st.integers(1, 50), max_size=40))
def test_first_fit_places_everything_once_and_overfills_nothing(lengths: list[int]) -> None:
    rows = first_fit(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    half_empty = [row for row in rows if sum(lengths[i] for i in row) <= 25]
    assert len(half_empty) <= 1


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens, a row holds 8"):
        pack([simple()], 8)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([], "no nodes"),
        ([AnswerNode([1], 1, None), AnswerNode([2])], "one pointer"),
        ([AnswerNode([1], 1, 1), AnswerNode([2])], "no tree"),
        ([AnswerNode([1], 1, 5), AnswerNode([2])], "no tree"),
        ([AnswerNode([1]), AnswerNode([2])], "cannot be reached"),
    ],
)
def test_pointers_that_make_no_tree_are_refused(nodes: list[AnswerNode], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        linearise([7], nodes, CONTROL, EOS)


def test_depth_counts_details_inside_details() -> None:
    flat = simple()
    nested = [AnswerNode([1], 1, 2), AnswerNode([2], 3, 4), AnswerNode([3]), AnswerNode([4]), AnswerNode([5])]
    assert flat.depth == 1
    assert linearise([7], nested, CONTROL, EOS).depth == 2
    assert linearise([7], [AnswerNode([1])], CONTROL, EOS).depth == 0
