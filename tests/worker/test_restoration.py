"""Restoration profiles: what is repaired, what is left alone, and that spans stay those of the text."""

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.results import Node
from worker.restoration import repair_thudm, restore


@dataclass
class Tree:
    """A node with its own text, and what it forked into."""

    text: str
    detail: "Tree | None" = None
    sibling: "Tree | None" = None


@dataclass
class Flat:
    """The same depth first, as answers are stored."""

    pieces: list[str] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    is_detail: list[bool] = field(default_factory=list)

    def add(self, tree: Tree, parent: int | None = None, is_detail: bool = False) -> "Flat":
        number = len(self.pieces)
        self.pieces.append(tree.text)
        self.parents.append(parent)
        self.is_detail.append(is_detail)
        for below in (tree.detail, tree.sibling):
            if below is not None:
                self.add(below, number, below is tree.detail)
        return self


def repaired(tree: Tree) -> list[str]:
    flat = Flat().add(tree)
    return repair_thudm(flat.pieces, flat.parents, flat.is_detail)


def without_space(text: str) -> str:
    return re.sub(r"^(?: +(?=\n)| )", "", text)


def expected(tree: Tree) -> str:
    """The rules on whole texts, as the reference has them, with two of ours: no space where a line begins, and nothing
    for nothing."""
    text = tree.text
    if tree.detail is not None:
        detail = expected(tree.detail)
        line = without_space(detail)
        if line.startswith("\n"):
            detail = line
        elif detail and re.search(r"\d+\. ", tree.text):
            detail = "\n" + line
        text += detail
    if tree.sibling is not None and (sibling := expected(tree.sibling)):
        line = without_space(sibling)
        text += line if line.startswith("\n\n") else "\n\n" + re.sub(r"\A\n*(?: +(?=\n))?", "", line)
    return text


LIST = Tree(
    "Some advice. 1. Routine:",
    Tree(" Go to bed at ten."),
    Tree(" 2. Stress:", Tree("Breathe."), Tree("See a doctor if it persists.")),
)


def test_numbered_points_get_the_lines_that_the_training_data_had_lost() -> None:
    assert repaired(LIST) == [
        "Some advice. 1. Routine:",
        "\nGo to bed at ten.",
        "\n\n2. Stress:",
        "\nBreathe.",
        "\n\nSee a doctor if it persists.",
    ]


def test_a_paragraphs_first_sentence_and_its_rest_stay_in_one_line() -> None:
    tree = Tree("Rain falls.", Tree(" It does so in drops."), Tree("Snow falls.", Tree(" In flakes."), Tree("")))
    assert repaired(tree) == ["Rain falls.", " It does so in drops.", "\n\nSnow falls.", " In flakes.", ""]


@pytest.mark.parametrize(
    ("head", "detail", "becomes"),
    [
        ("1. Head:", "\nis there", "\nis there"),
        ("1. Head:", "\n\n\nis there", "\n\n\nis there"),
        ("1. Head:", " \nis there", "\nis there"),
        ("1. Head:", "  two spaces", "\n two spaces"),
        ("1.Head:", " no", " no"),
        ("Head 12. :", " no", "\nno"),
        ("v1.", " no", " no"),
        ("Head:", "\nkept", "\nkept"),
        ("Head:", " kept", " kept"),
        ("1. Head:", "", ""),
        ("1. Head:", " ", "\n"),
    ],
)
def test_a_detail_gets_a_newline_where_its_node_holds_a_number(head: str, detail: str, becomes: str) -> None:
    assert repaired(Tree(head, Tree(detail), Tree("."))) == [head, becomes, "\n\n."]


@pytest.mark.parametrize(
    ("sibling", "becomes"),
    [
        ("2. B", "\n\n2. B"),
        (" 2. B", "\n\n2. B"),
        ("\n2. B", "\n\n2. B"),
        (" \n2. B", "\n\n2. B"),
        ("\n\n2. B", "\n\n2. B"),
        (" \n\n2. B", "\n\n2. B"),
        ("\n\n\n\n2. B", "\n\n\n\n2. B"),
        ("", ""),
        ("\n", "\n\n"),
    ],
)
def test_a_sibling_starts_with_a_blank_line(sibling: str, becomes: str) -> None:
    assert repaired(Tree("A.", Tree(" b"), Tree(sibling))) == ["A.", " b", becomes]


def test_what_a_node_without_text_forked_stands_where_it_would() -> None:
    inner = Tree("", Tree(" deep"), Tree(" \n"))
    assert repaired(Tree("1. A:", inner, Tree("", Tree("\nb"), Tree("c")))) == [
        "1. A:", "\n", "deep", "\n\n", "\n\n", "b", "\n\nc"
    ]  # fmt: skip


def test_a_cut_answer_ends_where_it_was_cut() -> None:
    tree = Tree("1. A:", Tree(" b"), Tree(" 2.", Tree(""), Tree("", Tree(""), Tree(""))))
    assert repaired(tree) == ["1. A:", "\nb", "\n\n2.", "", "", "", ""]


TEXTS = st.text(alphabet=st.sampled_from("\n\n  a1.é"), max_size=6) | st.sampled_from(["", "1. A:", " b", "\n", "\n\n"])
TREES = st.recursive(
    st.builds(Tree, TEXTS), lambda inner: st.builds(Tree, TEXTS, inner, inner), max_leaves=12
)  # both pointers or neither


@given(TREES)
def test_pieces_add_up_to_what_the_rules_on_whole_texts_give(tree: Tree) -> None:
    assert "".join(repaired(tree)) == expected(tree)


@example(Tree("", Tree("", None, None), Tree("", Tree("  \n", None, None), Tree("", None, None))))
@example(Tree("", Tree(""), Tree("", Tree("\n \n"), Tree(""))))
@example(Tree("", Tree(""), Tree("\n ", Tree(""), Tree("1"))))
@given(TREES)
def test_the_repair_of_a_repaired_answer_changes_nothing(tree: Tree) -> None:
    flat = Flat().add(tree)
    once = repair_thudm(flat.pieces, flat.parents, flat.is_detail)
    assert repair_thudm(once, flat.parents, flat.is_detail) == once


@given(TREES)
def test_nothing_but_blanks_at_the_start_of_nodes_changes(tree: Tree) -> None:
    flat = Flat().add(tree)
    for before, after in zip(flat.pieces, repaired(tree), strict=True):
        assert before.lstrip("\n ") == after.lstrip("\n ")
    assert repaired(tree)[0] == tree.text


@given(TREES, st.sampled_from(["exact", "thudm"]))
def test_spans_are_those_of_the_text_and_tokens_are_left_alone(tree: Tree, profile: str) -> None:
    flat = Flat().add(tree)
    nodes, text = [], ""
    for number, (piece, parent, is_detail) in enumerate(zip(flat.pieces, flat.parents, flat.is_detail, strict=True)):
        kind = "root" if parent is None else "detail" if is_detail else "sibling"
        places = (len(text), len(text) + len(piece))
        nodes.append(Node(number, parent, kind, 0, number, number + 1, number, number, *places))
        text += piece
    restored, placed = restore(profile, text, nodes)
    assert [node.text_start for node in placed] == [0, *(node.text_end for node in placed[:-1])]
    assert placed[-1].text_end == len(restored)
    assert [(n.node, n.parent, n.kind, n.start, n.end) for n in placed] == [
        (n.node, n.parent, n.kind, n.start, n.end) for n in nodes
    ]
    pieces = flat.pieces if profile == "exact" else repaired(tree)
    assert [restored[node.text_start : node.text_end] for node in placed] == pieces


def test_an_answer_that_did_not_fork_or_has_no_tree_is_left_alone() -> None:
    node = Node(0, None, "root", 0, 0, 3, 0, 2, 0, 5)
    assert restore("thudm", " a\nb\n", [node]) == (" a\nb\n", (node,))
    assert restore("thudm", " a\nb\n", []) == (" a\nb\n", ())
