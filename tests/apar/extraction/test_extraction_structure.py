"""Trees of spans: building, restoring, and the faults that are found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar.extraction import TreeError, TreeNode, restore, verify
from apar.extraction.structure import Split, attended_share, build


def splits_of(draw: st.DrawFn, start: int, end: int, depth: int) -> list[Split]:
    found, at = [], start
    while at < end and depth and draw(st.booleans()):
        head_end = draw(st.integers(at, end - 1))
        detail_end = draw(st.integers(head_end + 1, end))
        found.append(Split(head_end, detail_end, splits_of(draw, head_end, detail_end, depth - 1)))
        at = detail_end
    return found


@st.composite
def texts_with_splits(draw: st.DrawFn) -> tuple[str, list[Split]]:
    text = draw(st.text(max_size=40))
    return text, splits_of(draw, 0, len(text), 3)


@given(texts_with_splits())
def test_every_built_tree_tiles_its_text_and_restores_it(case: tuple[str, list[Split]]) -> None:
    text, splits = case
    nodes = build(0, len(text), splits)
    verify(text, nodes)
    assert restore(text, nodes) == text
    assert nodes[0].start == 0
    for number, node in enumerate(nodes):  # numbers are in restored order
        if node.first_child is not None:
            assert number < node.first_child < (node.next_sibling or 0)


def test_a_list_becomes_heads_on_one_thread_and_a_detail_on_each_of_the_others() -> None:
    text = "1. A: aa\n2. B: bb\nEnd"
    nodes = build(0, len(text), [Split(5, 8), Split(14, 17)])
    assert nodes == [
        TreeNode(0, 5, 1, 2),
        TreeNode(5, 8),
        TreeNode(8, 14, 3, 4),
        TreeNode(14, 17),
        TreeNode(17, 21),
    ]


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        ([], "no nodes"),
        ([TreeNode(0, 2, 1, None), TreeNode(2, 3)], "one pointer"),
        ([TreeNode(0, 2, 1, 5), TreeNode(2, 3)], "leads to node 5"),
        ([TreeNode(0, 2, 1, 1), TreeNode(2, 3)], "reached twice"),
        ([TreeNode(0, 3), TreeNode(3, 3)], "not reached"),
        ([TreeNode(0, 2)], "end at 2"),
        ([TreeNode(1, 3)], "has come to 0"),
        ([TreeNode(0, 3, 1, 2), TreeNode(3, 3), TreeNode(3, 3)], "empty"),
    ],
)
def test_a_fault_in_a_tree_is_named(nodes: list[TreeNode], fault: str) -> None:
    with pytest.raises(TreeError, match=fault):
        verify("abc", nodes)


def test_restoring_refuses_a_ring() -> None:
    with pytest.raises(TreeError, match="twice"):
        restore("abc", [TreeNode(0, 1, 1, 2), TreeNode(1, 2, 0, 2), TreeNode(2, 3)])


def test_the_attended_share_is_that_of_pairs_on_one_path() -> None:
    assert attended_share(build(0, 10, [])) == 1.0
    nodes = build(0, 10, [Split(2, 5), Split(7, 10)])  # heads of 2 characters, details of 3
    heads, details = (0 + 1) + (2 + 3), (2 + 3 + 4) + (4 + 5 + 6)
    assert attended_share(nodes) == (heads + details) / 45
    assert attended_share([]) == attended_share(build(0, 1, [])) == 1.0
