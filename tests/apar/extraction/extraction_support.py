"""What tests of extraction say and expect."""

from typing import Any

from apar.extraction import Extraction, Options, TreeNode, extract, restore, verify


def extracted(text: str, rules: Any = "markdown", **options: Any) -> Extraction:
    """Extract, and check what holds for every outcome."""
    outcome = extract(text, rules, Options(**options))
    if outcome.nodes is None:
        assert outcome.kind is None
        assert outcome.reason
    else:
        verify(text, outcome.nodes)
        assert restore(text, outcome.nodes) == text
        assert (outcome.kind == "unstructured") == (len(outcome.nodes) == 1) == bool(outcome.reason)
    return outcome


def details(text: str, rules: Any = "markdown", **options: Any) -> list[str]:
    """The details of a text's tree, in order, nested ones within theirs."""
    nodes = extracted(text, rules, **options).nodes or []
    return [text[nodes[child].start : end_of(nodes, child)] for child in (n.first_child for n in nodes) if child]


def heads(text: str, rules: Any = "markdown", **options: Any) -> list[str]:
    """What stands before each fork, from the end of the detail before it."""
    nodes = extracted(text, rules, **options).nodes or []
    return [text[node.start : node.end] for node in nodes if node.first_child is not None]


def end_of(nodes: list[TreeNode], number: int) -> int:
    """Where the thread that begins with a node ends, with all that it forks."""
    while nodes[number].next_sibling is not None:
        number = nodes[number].next_sibling or 0
    return nodes[number].end


def reason(text: str, rules: Any = "markdown", **options: Any) -> tuple[str | None, str | None]:
    outcome = extracted(text, rules, **options)
    return outcome.kind, outcome.reason
