"""Restoration profiles: repairs of the text of restored answers, for checkpoints that need them.

An answer is the texts of its tree's nodes one after another. Our own models need nothing else: the profile `exact`. A
profile changes these texts, and so where each node begins and ends in the output; it never moves text between nodes and
never touches the tokens, whose spans and counts stay what the model wrote.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from jobs.results import Node

PROFILES = ("exact", "thudm")
_NUMBER = re.compile(r"\d+\. ")


def restore(profile: str, text: str, nodes: Sequence[Node]) -> tuple[str, tuple[Node, ...]]:
    """The answer's text under a profile, and its nodes with their spans in that text; the same for `exact`.

    Args:
        text: the texts of `nodes`, which are depth first, one after another.
    """
    assert profile in PROFILES, "the settings know no other"
    if profile == "exact" or len(nodes) < 2:
        return text, tuple(nodes)
    pieces = [text[node.text_start : node.text_end] for node in nodes]
    repaired = repair_thudm(pieces, [node.parent for node in nodes], [node.kind == "detail" for node in nodes])
    placed, end = [], 0
    for node, piece in zip(nodes, repaired, strict=True):
        placed.append(replace(node, text_start=end, text_end=end + len(piece)))
        end += len(piece)
    return "".join(repaired), tuple(placed)


def repair_thudm(pieces: Sequence[str], parents: Sequence[int | None], is_detail: Sequence[bool]) -> list[str]:
    """Put back the line breaks that the training data of THUDM/apar-7b and apar-13b had lost around control tokens.

    - A detail, with all that stands below it, that does not start with a newline gets one when the text of the node
      that forked it holds a number such as `3. `. Otherwise it stays as it is.
    - A next sibling starts with a blank line; newlines that it has become part of it.
    - The space that this tokenizer writes in front of whatever follows a control token goes where a line begins. The
      reference never sees it, because it decodes each node alone.
    - Where nothing follows, nothing is put: an empty sibling ends an answer, and a stop string or a limit may cut one.

    The repair of a repaired answer changes nothing.

    Args:
        pieces: the text of each node, depth first.
        parents: the node each one hangs on; None for the root alone.
        is_detail: whether a node is its parent's first child; the others but the root are next siblings.

    Source: the restoration of the reference implementation, `get_text` in fastchat/vs.py of THUDM/APAR.
    """
    repaired = list(pieces)
    ends = _subtree_ends(parents)
    # Backwards, so that everything below a node is repaired before it, and its parent's own text not yet.
    for number in reversed(range(1, len(repaired))):
        parent = parents[number]
        assert parent is not None
        below = range(number, ends[number])
        if not any(repaired[i] for i in below):
            continue
        text = "".join(repaired[i] for i in below)
        line = _without_space(text)
        if is_detail[number]:
            newlines = "" if line.startswith("\n") or not _NUMBER.search(repaired[parent]) else "\n"
            keeps_space = not line.startswith("\n") and not newlines
            rest = text if keeps_space else line
        else:
            newlines, rest = ("", line) if line.startswith("\n\n") else ("\n\n", _without_blanks(line.lstrip("\n")))
        _cut_front(repaired, below, len(text) - len(rest))
        repaired[number] = newlines + repaired[number]
    return repaired


def _without_space(text: str) -> str:
    """The text without the tokenizer's space in front; blanks in front of a newline are no text at all."""
    bare = _without_blanks(text)
    return bare if bare.startswith("\n") else bare.removeprefix(" ")


def _without_blanks(text: str) -> str:
    """The text without the blanks in front of a newline."""
    bare = text.lstrip(" ")
    return bare if bare.startswith("\n") else text


def _subtree_ends(parents: Sequence[int | None]) -> list[int]:
    """For each node, the number behind the last one below it: in depth-first order they follow one another."""
    ends = list(range(1, len(parents) + 1))
    for number in reversed(range(len(parents))):
        parent = parents[number]
        if parent is not None:
            ends[parent] = max(ends[parent], ends[number])
    return ends


def _cut_front(pieces: list[str], numbers: Sequence[int], num_characters: int) -> None:
    for number in numbers:
        cut = min(num_characters, len(pieces[number]))
        pieces[number] = pieces[number][cut:]
        num_characters -= cut
