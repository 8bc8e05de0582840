"""Markdown blocks with exact places: what an answer consists of, in code points of the original text.

Receives an answer; hands on a list of top-level `Block`s. markdown-it-py reads the block structure only (no inline
syntax, whose cost is not linear); its line numbers become offsets here. The text it reads differs from the original in
single characters of the same width, so every offset holds in the original.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

BlockType = Literal["paragraph", "heading", "list", "item", "quote", "code", "html", "table", "rule"]

BLANK = " \t\r\n"
"""What Markdown calls blank; other white space is text and stays where it is."""
_NEWLINE = re.compile(r"\r\n?|\n")
_TYPOGRAPHIC_BULLET = re.compile(r"^([ \t]*)[•●▪◦‣·∙](?=[ \t])", re.MULTILINE)
_TYPES: dict[str, BlockType] = {
    "paragraph_open": "paragraph",
    "heading_open": "heading",
    "ordered_list_open": "list",
    "bullet_list_open": "list",
    "list_item_open": "item",
    "blockquote_open": "quote",
    "table_open": "table",
    "fence": "code",
    "code_block": "code",
    "html_block": "html",
    "hr": "rule",
}


@dataclass(slots=True)
class Block:
    """One block. `start` is its first character (of an item: its content's), `end` is behind its last one that is not
    blank."""

    type: BlockType
    start: int
    end: int
    level: int = 0
    """Of a heading: 1 to 6."""
    marker: str = ""
    """Of a list and its items: `.` or `)` for numbers, the character for bullets. Of code: the fence, or nothing."""
    number: int | None = None
    """Of an item in a numbered list."""
    children: "list[Block]" = field(default_factory=list)


class Lines:
    """Where the lines of a text begin and end, as Markdown counts lines."""

    def __init__(self, text: str) -> None:
        self.starts = [0]
        self.ends = []
        for newline in _NEWLINE.finditer(text):
            self.ends.append(newline.start())
            self.starts.append(newline.end())
        self.ends.append(len(text))

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, offset: int) -> int:
        """The number of the line that holds an offset."""
        return max(0, bisect_left(self.starts, offset + 1) - 1)


def parse(text: str) -> list[Block]:
    """Read the blocks of a text, in order, nested as Markdown nests them."""
    lines = Lines(text)
    tokens = _parser().parse(_TYPOGRAPHIC_BULLET.sub(r"\1-", text))
    top: list[Block] = []
    open_blocks: list[Block | None] = []
    for index, token in enumerate(tokens):
        if token.nesting < 0:
            closed = open_blocks.pop()
            if closed is not None and closed.type == "item" and closed.children:
                closed.start = closed.children[0].start
            continue
        block = _block(token, tokens[index + 1] if index + 1 < len(tokens) else None, text, lines)
        if block is not None:
            parent = next((opened for opened in reversed(open_blocks) if opened is not None), None)
            (top if parent is None else parent.children).append(block)
        if token.nesting > 0:
            open_blocks.append(block)
    return top


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.disable(["reference"])
    return parser


def _block(token: "Token", following: "Token | None", text: str, lines: Lines) -> Block | None:
    kind = _TYPES.get(token.type)
    if kind is None or token.map is None:
        return None
    first, last = token.map[0], min(token.map[1], len(lines)) - 1
    if first > last:
        return None
    start, stop = lines.starts[first], lines.ends[last]
    end = start + len(text[start:stop].rstrip(BLANK))
    if end <= start:  # an item without content
        return None
    start = _content_start(text, start, min(lines.ends[first], end), following, kind)
    if end <= start:  # of white space that is not Markdown's
        return None
    block = Block(kind, start, end)
    if kind == "heading" and token.markup == "-" and text[end - 4 : end] in ("\n---", "\r---"):
        return Block("paragraph", start, start + len(text[start : end - 3].rstrip(BLANK)))  # a rule is meant
    if kind == "heading":
        block.level = int(token.tag[1:])
    elif kind in ("list", "item"):
        block.marker = token.markup
        block.number = int(token.info) if kind == "item" and token.info.isdigit() else None
    elif kind == "code":
        block.marker = token.markup
    return block


def _content_start(text: str, start: int, line_end: int, inline: "Token | None", kind: BlockType) -> int:
    """Where a paragraph's or heading's text begins: its first line is the tail of a source line, behind all markers."""
    if kind in ("paragraph", "heading") and inline is not None and inline.type == "inline":
        content = _NEWLINE.split(inline.content, maxsplit=1)[0].rstrip(BLANK)
        line = text[start:line_end].rstrip(BLANK)
        if kind == "heading":
            found = line.find(content)
            return start + found if found > 0 and content else start
        if len(content) < len(line):
            return start + len(line) - len(content)
        return start
    while start < line_end and text[start] in BLANK:
        start += 1
    return start
