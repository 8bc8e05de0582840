from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from apar.decoding.drafting import NO_PARENT
from apar.decoding.ptd_tree import DraftingTree, DraftNode

EOS = 9
NO_EOS: frozenset[int] = frozenset()


def tree_of(
    *chains: Sequence[int], width: int = 4, depth: int = 6, max_nodes: int = 100, eos: frozenset[int] = NO_EOS
) -> DraftingTree:
    tree = DraftingTree(width, depth, max_nodes, eos)
    tree.seed(chains)
    return tree


def shape(tree: DraftingTree) -> list[tuple[int, object]]:
    """Root children in the order of the line, each with its children likewise."""

    def of(node: DraftNode) -> tuple[int, object]:
        return node.token_id, [of(child) for child in node.children.values()]

    nodes, _ = tree.nodes()
    return [of(node) for node in nodes[: line_length(tree)]]


def line_length(tree: DraftingTree) -> int:
    """All nodes but the root children are somebody's child."""
    nodes, _ = tree.nodes()
    return len(nodes) - sum(len(node.children) for node in nodes)


def height(node: DraftNode) -> int:
    return max((1 + height(child) for child in node.children.values()), default=0)


def grow(tree: DraftingTree, predictions: dict[int, int], next_token: int = 0) -> None:
    """Predictions by the node's token, which must be unique in the tree."""
    nodes, _ = tree.nodes()
    assert len({node.token_id for node in nodes}) == len(nodes)
    tree.grow([predictions[node.token_id] for node in nodes], next_token)


def test_root_children_stand_in_a_line_with_their_subtrees_hanging_from_their_places() -> None:
    tree = tree_of([10, 11], [20, 21])
    nodes, parents = tree.nodes()
    assert [node.token_id for node in nodes] == [10, 20, 11, 21]
    assert parents == [NO_PARENT, 0, 0, 1]


def test_every_node_gains_its_prediction_as_a_child() -> None:
    tree = tree_of([10, 11], [20], width=2)
    grow(tree, {10: 12, 11: 13, 20: 22})
    assert shape(tree) == [(10, [(11, [(13, [])]), (12, [])]), (20, [(22, [])])]


def test_a_prediction_that_is_a_child_already_adds_nothing() -> None:
    tree = tree_of([10, 11], width=1)
    grow(tree, {10: 11, 11: 12})
    assert shape(tree) == [(10, [(11, [(12, [])])])]


def test_a_node_with_w_children_gains_no_more() -> None:
    tree = tree_of([10], [20], width=2)
    for step in range(3):
        nodes, _ = tree.nodes()
        tree.grow([100 * (1 + place) + step for place in range(len(nodes))], 0)
    nodes, _ = tree.nodes()
    assert list(nodes[0].children) == [100, 101]


def test_while_the_line_is_short_its_end_grows_along_the_line() -> None:
    tree = tree_of([10], [20], width=4)
    grow(tree, {10: 12, 20: 30})
    assert shape(tree) == [(10, [(12, [])]), (20, []), (30, [])]


def test_a_child_that_is_predicted_again_moves_into_the_line_with_its_subtree() -> None:
    tree = tree_of([20, 30], width=4)
    grow(tree, {20: 30, 30: 31})
    assert shape(tree) == [(20, []), (30, [(31, [])])]


def test_a_token_stands_in_the_line_once() -> None:
    tree = tree_of([10], [20], width=4)
    grow(tree, {10: 12, 20: 10})
    assert shape(tree) == [(10, [(12, [])]), (20, [(10, [])])]


def test_a_subtree_of_height_d_goes_on_from_its_earliest_child() -> None:
    tree = tree_of([10, 11], [20], width=2, depth=2)
    grow(tree, {10: 12, 11: 13, 20: 21})
    assert shape(tree) == [(11, [(13, [])]), (20, [(21, [])])]


def test_a_subtree_is_dropped_when_its_earliest_child_stands_in_the_line() -> None:
    tree = tree_of([10, 20], [20], width=2, depth=2)
    tree.grow([12, 21, 13], 0)
    assert shape(tree) == [(20, [(21, [])])]


def test_a_subtree_that_eos_comes_into_is_dropped() -> None:
    tree = tree_of([10, 11], [20, 21], width=2, eos=frozenset({EOS}))
    grow(tree, {10: 12, 11: EOS, 20: 22, 21: 23})
    assert shape(tree) == [(20, [(21, [(23, [])]), (22, [])])]


def test_a_line_that_was_dropped_begins_again_with_the_prediction_behind_the_path() -> None:
    tree = tree_of([10], width=2, eos=frozenset({EOS}))
    grow(tree, {10: EOS})
    assert shape(tree) == []
    tree.grow([], 7)
    assert shape(tree) == [(7, [])]


def test_the_line_does_not_begin_with_eos() -> None:
    tree = tree_of(eos=frozenset({EOS}))
    tree.grow([], EOS)
    assert shape(tree) == []


def test_in_a_tree_with_too_many_nodes_the_largest_subtree_steps_before_its_time() -> None:
    tree = tree_of([10, 11], [20], width=2, max_nodes=5)
    grow(tree, {10: 12, 11: 13, 20: 21})  # 10 with 11, 13 and 12 is the larger one
    assert shape(tree) == [(11, [(13, [])]), (20, [(21, [])])]


def test_a_lone_root_child_is_dropped_where_there_is_no_room_for_it() -> None:
    tree = tree_of([10], [20], [30], width=3, max_nodes=2)
    tree.grow([20, 30, 10], 0)
    assert len(tree.nodes()[0]) == 2


def test_a_small_tree_keeps_moving_on() -> None:
    tree = tree_of([10], [20], width=2, depth=6, max_nodes=6)
    seen = set()
    for step in range(30):
        nodes, _ = tree.nodes()
        assert len(nodes) <= 6
        seen |= {node.token_id for node in nodes}
        tree.grow([1000 * step + place for place in range(len(nodes))], 0)
    assert len(seen) > 60


def test_subtrees_come_with_the_predictions_in_them_for_the_pool() -> None:
    tree = tree_of([10, 11], [20])
    # In the order of `nodes`: 10, 20, 11.
    assert tree.tries([12, 21, 13]) == [(10, {11: {13: {}}, 12: {}}), (20, {21: {}}), (11, {13: {}})]
    assert shape(tree) == [(10, [(11, [])]), (20, [])]


def test_a_prediction_of_eos_goes_to_the_pool_though_not_into_the_tree() -> None:
    tree = tree_of([10], eos=frozenset({EOS}))
    assert tree.tries([EOS]) == [(10, {EOS: {}})]


@given(
    width=st.integers(1, 4),
    depth=st.integers(1, 5),
    max_nodes=st.integers(4, 40),
    first=st.lists(st.integers(0, 8), min_size=1, max_size=2, unique=True),
    data=st.data(),
)
def test_a_growing_tree_keeps_to_its_limits(
    width: int, depth: int, max_nodes: int, first: list[int], data: st.DataObject
) -> None:
    tree = tree_of(
        *([token] for token in first[:width]), width=width, depth=depth, max_nodes=max_nodes, eos=frozenset({EOS})
    )
    for _ in range(12):
        nodes, parents = tree.nodes()
        count = line_length(tree)
        assert count <= width
        assert len({node.token_id for node in nodes[:count]}) == count
        assert len(nodes) <= max_nodes
        assert all(parent < place for place, parent in enumerate(parents))
        assert all(len(node.children) <= width for node in nodes)
        assert all(node.token_id != EOS for node in nodes)
        assert all(height(root) < depth for root in nodes[:count])
        predictions = data.draw(st.lists(st.integers(0, EOS), min_size=len(nodes), max_size=len(nodes)))
        tree.grow(predictions, data.draw(st.integers(0, EOS)))
