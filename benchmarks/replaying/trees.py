"""Cuts an answer's text into threads, by the structure the answer itself has.

Receives plain text; hands on a `TextTree`, whose pieces put together in order are the text again, byte for byte,
because every piece is a slice of it. Numbered lists come first: what stands before an item's colon (or its first
sentence) stays in the parent thread, the rest of the item becomes a child. An answer without a list is cut at its
paragraphs: the first sentence stays, the rest is the child. Source: the paper's extraction rules (section 3.1), kept
simple: this file makes a workload, not training data.
"""

import re
from collections.abc import Iterator

TextTree = list["str | TextTree"]
"""One thread: the text it writes itself, and in the places where it forks, the child's `TextTree`."""

MIN_FORKS = 3
"""An answer with fewer points is left alone, as in the paper."""
MAX_FORKS = 64
"""The engine's own default limit (`max_forks`): what lies behind stays with the parent."""
MIN_LIST_DETAIL_CHARS = 10
MIN_PARAGRAPH_PIECE_CHARS = 20
MAX_HEADING_CHARS = 120

_ITEM = re.compile(r"^([ \t]*)\d+[.)][ \t]+", re.MULTILINE)
_CONTINUATION = re.compile(r"\n(?:[ \t]+|[-*•][ \t])[^\n]*")
"""A line that still belongs to the list item above it: indented, or a bullet."""
_COLON = re.compile(r":\**(?=\s)")
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bDr)(?<!\bMrs)(?<!\be\.g)(?<!\bi\.e)[.!?](?=\s)")
_PARAGRAPH = re.compile(r"[^\n]+")
"""Answers put paragraphs on lines of their own, with or without a blank one between."""

Span = tuple[int, int]


def text_tree(text: str, max_depth: int = 1) -> TextTree:
    """The answer as threads. A text without structure is one thread: `[text]`. Details fork below `max_depth` only."""
    if max_depth < 1 or "```" in text:  # numbered lines of code are no list
        return [text]
    for find_details in (_list_details, _paragraph_details):
        details = list(find_details(text))[:MAX_FORKS]
        if len(details) >= MIN_FORKS:
            return _cut(text, details, max_depth)
    return [text]


def join(tree: TextTree) -> str:
    """The text of a tree: each child's text where its parent forked."""
    return "".join(piece if isinstance(piece, str) else join(piece) for piece in tree)


def _cut(text: str, details: list[Span], max_depth: int) -> TextTree:
    tree: TextTree = []
    position = 0
    for start, end in details:
        tree += [text[position:start], text_tree(text[start:end], max_depth - 1)]
        position = end
    return [*tree, text[position:]] if position < len(text) else tree


def _list_details(text: str) -> Iterator[Span]:
    """Half-open spans of the details of the outermost numbered points, without the line's end."""
    items = list(_ITEM.finditer(text))
    least_indent = min((len(item[1]) for item in items), default=0)
    items = [item for item in items if len(item[1]) == least_indent]
    starts = {item.start() for item in items}
    for item in items:
        line_end = text.find("\n", item.end())
        end = len(text) if line_end < 0 else line_end
        while (more := _CONTINUATION.match(text, end)) and end + 1 not in starts:
            end = more.end()
        end = len(text[:end].rstrip())
        limit = min(end, item.end() + MAX_HEADING_CHARS)
        heading = _COLON.search(text, item.end(), limit) or _SENTENCE_END.search(text, item.end(), end)
        if heading is not None and end - heading.end() >= MIN_LIST_DETAIL_CHARS:
            yield heading.end(), end


def _paragraph_details(text: str) -> Iterator[Span]:
    """Half-open spans of what follows the first sentence of each paragraph."""
    for paragraph in _PARAGRAPH.finditer(text):
        start, end = paragraph.start(), len(text[: paragraph.end()].rstrip())
        first = _SENTENCE_END.search(text, start, end)
        if first is None or first.end() - start < MIN_PARAGRAPH_PIECE_CHARS:
            continue
        if end - first.end() >= MIN_PARAGRAPH_PIECE_CHARS:
            yield first.end(), end
