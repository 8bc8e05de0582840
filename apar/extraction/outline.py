"""Blocks as a language model means them, where that differs from what Markdown makes of them.

Receives the blocks of `blocks.parse`; hands on top-level blocks in which a line that is a paragraph is one, the
sentence behind a list is not part of its last point, and a numbered list that unindented text interrupts is one again.
"""

import re

from apar.extraction.blocks import BLANK, Block
from apar.extraction.heads import Heads

_NEWLINE = re.compile(r"\r\n?|\n")
_LINE_OF_ITS_OWN = re.compile(r"[.!?:。！？：…][\"'”’»)\]*_]*$|^\*\*[^*\n]{1,200}\*\*$|^__[^_\n]{1,200}__$")
_UNWRAPPED_CHARS = 160
"""Nobody wraps lines by hand at this width: a text with longer lines means its line ends."""


def outline(text: str, blocks: list[Block], heads: Heads) -> list[Block]:
    """Rearrange top-level blocks; every block keeps its place in the text."""
    found: list[Block] = []
    for block in blocks:
        if block.type == "paragraph":
            found += _lines_or_whole(text, block)
        elif block.type == "list":
            found.append(block)
            found += _cut_lazy_lines(text, block)
        else:
            found.append(block)
    return _join_lists(text, found, heads)


def _lines_or_whole(text: str, block: Block) -> list[Block]:
    lines = _line_spans(text, block.start, block.end)
    if len(lines) < 2 or not _are_paragraphs(text, lines):
        return [block]
    return [Block("paragraph", start, end) for start, end in lines]


def _are_paragraphs(text: str, lines: list[tuple[int, int]]) -> bool:
    """Whether line ends are meant: lines end as sentences and titles do, or are too long to be wrapped."""
    before_last = [text[start:end] for start, end in lines[:-1]]
    return all(map(_LINE_OF_ITS_OWN.search, before_last)) or any(len(line) > _UNWRAPPED_CHARS for line in before_last)


def _line_spans(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Lines without the blanks around them; blank lines are left out."""
    spans = []
    at = start
    for stop, following in [*(match.span() for match in _NEWLINE.finditer(text, start, end)), (end, end)]:
        line = text[at:stop]
        if line.strip(BLANK):
            spans.append((at + len(line) - len(line.lstrip(BLANK)), at + len(line.rstrip(BLANK))))
        at = following
    return spans


def _cut_lazy_lines(text: str, block: Block) -> list[Block]:
    """Take unindented lines off the end of a list: Markdown reads them as its last point, people as what follows."""
    items = [item for item in block.children if item.type == "item"]
    if not items or sum(_lazy_from(text, item) is not None for item in items[:-1]) * 2 > len(items) - 1 > 0:
        return []
    cut = _lazy_from(text, items[-1])
    if cut is None:
        return []
    stop = block.end
    chain = [block]
    while chain[-1].children:
        chain.append(chain[-1].children[-1])
    end = cut - len(text[:cut][max(0, cut - 200) :]) + len(text[max(0, cut - 200) : cut].rstrip(BLANK))
    for parent in chain:
        parent.end = end
    return [Block("paragraph", start, line_end) for start, line_end in _line_spans(text, cut, stop)]


def _lazy_from(text: str, item: Block) -> int | None:
    """Where the unindented last lines of an item begin, if the line before them is complete."""
    last = item
    while last.children:
        last = last.children[-1]
    if last.type != "paragraph":
        return None
    lines = _line_spans(text, last.start, last.end)
    first = len(lines)
    while first > 1 and (lines[first - 1][0] == 0 or text[lines[first - 1][0] - 1] in "\r\n"):
        first -= 1
    if first == len(lines) or not _are_paragraphs(text, lines[first - 1 :] if first > 1 else lines):
        return None
    return lines[first][0]


def _join_lists(text: str, blocks: list[Block], heads: Heads) -> list[Block]:
    """Make one list of lists that go on with each other's numbers; what stands between belongs to the point before."""
    found: list[Block] = []
    between: list[Block] = []
    joined: dict[int, list[list[Block]]] = {}
    for block in blocks:
        current = found[-1] if found else None
        if block.type == "list" and current is not None and current.type == "list":
            if _goes_on(text, current, between, block, heads):
                if between:
                    _attach(current, between)
                    joined.setdefault(id(current), []).append(between)
                current.children += block.children
                current.end = block.end
                between = []
                continue
            if block.marker not in ".)" and current.marker in ".)" and not between:
                between.append(block)  # perhaps the bullets of a point that is not indented
                continue
        if current is not None and current.type == "list" and block.type not in ("heading", "rule", "code"):
            if block.type == "list" and block.marker in ".)":
                _settle(current, between, joined, heads)
                found += [*between, block]
                between = []
            else:
                between.append(block)
            continue
        if current is not None:
            _settle(current, between, joined, heads)
        found += [*between, block]
        between = []
    if found:
        _settle(found[-1], between, joined, heads)
    return [*found, *between]


def _goes_on(text: str, current: Block, between: list[Block], block: Block, heads: Heads) -> bool:
    if block.marker != current.marker or not block.children or not current.children:
        return False
    last, first = current.children[-1], block.children[0]
    bare = _is_bare(last, heads)
    if current.marker in ".)":
        follows = last.number is not None and first.number in (last.number + 1, 1 if last.number == 1 else -1)
        if not follows:
            return False
        introduces = bool(between) and text[between[-1].end - 1] in ":："
        return bare or not introduces
    one_by_one = len(block.children) == 1 and (
        len(current.children) == 1 or current.children[-2].end > current.children[-2].children[0].end
    )
    return bare and one_by_one and 0 < len(between) <= 3 and all(part.type == "paragraph" for part in between)


def _is_bare(item: Block, heads: Heads) -> bool:
    """Whether an item has a head only."""
    first_end = item.children[0].end if item.children else item.end
    return heads.of_item(item.start, first_end, item.end) is None


def _attach(current: Block, parts: list[Block]) -> None:
    item = current.children[-1]
    item.children = [*item.children, *parts]
    item.end = current.end = parts[-1].end


def _settle(current: Block, between: list[Block], joined: dict[int, list[list[Block]]], heads: Heads) -> None:
    """Give the last point what follows it, if the points before it have such blocks and it has no detail yet."""
    before = joined.get(id(current), [])
    if not before or not between or not _is_bare(current.children[-1], heads):
        return
    types = {part.type for parts in before for part in parts}
    most = max(len(parts) for parts in before) if "list" in types else min(len(parts) for parts in before)
    count = 0
    while count < min(most, len(between)) and between[count].type in types:
        count += 1
    if count:
        _attach(current, between[:count])
        del between[:count]
