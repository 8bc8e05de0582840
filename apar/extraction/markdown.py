"""The `markdown` rules: answers as today's models write them.

Receives an answer; hands on its tree, or why it has none. Each structure that may fork (points of lists, sections under
headings or titles, paragraphs) gives a candidate; the one whose longest thread is shortest is taken.
"""

import re
from dataclasses import dataclass, field
from itertools import pairwise

from apar.extraction import signals
from apar.extraction.blocks import BLANK, Block, parse
from apar.extraction.heads import Heads
from apar.extraction.options import Extraction, Kind, Options
from apar.extraction.outline import outline
from apar.extraction.protected import Protected
from apar.extraction.structure import Split, TreeNode, build

_TITLE_LEVEL, _LABEL_LEVEL = 7, 8
"""Below all headings: a paragraph that is a title in bold; one that is a label with a colon."""
_BOLD_PARAGRAPH = re.compile(r"(?:\*\*[^*\n]{1,200}\*\*|__[^_\n]{1,200}__)[ \t]*:?")
_MIN_PIECE_CHARS = 20
"""Of a paragraph's first sentence and of its rest. Source: APAR paper, appendix B."""
_PARAGRAPH_MUST_WIN = 0.8
"""Paragraphs are taken over lists and sections only if their longest thread is shorter by this factor."""
_OWN_BLOCKS = ("paragraph", "heading", "rule", "code", "html")
"""Blocks that are not part of the paragraph before them."""
_BIBLIOGRAPHY = re.compile(r"[#*_ ]*(?:works cited|references|bibliography|sources|citations)[:*_ ]*", re.IGNORECASE)
"""What follows is titles and publishers: their full stops end no sentences."""
_INLINE_POINTS = re.compile(r"(?<=[\s:;.,])\(?(\d{1,2})[.)]\s")


@dataclass(slots=True)
class Point:
    """A head and the blocks of its detail."""

    head_end: int
    detail_end: int
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class _Candidate:
    kind: Kind
    points: list[Point]


def extract_markdown(text: str, options: Options) -> Extraction:
    """Extract by the `markdown` rules."""
    heads = Heads(text, Protected(text), options.min_detail_chars)
    parsed = parse(text)
    blocks = outline(text, parsed, heads)
    code = signals.code_blocks(text, parsed)
    reason = _never_forks(text, parsed, blocks, code)
    if reason is not None or (code and options.code == "never"):
        return without_tree(text, blocks, heads, options, reason or "code")
    candidate = _choose(text, blocks, len(text), heads, options, with_paragraphs=not code or options.code == "whole")
    if candidate is None or (options.code == "outside" and any(_in_detail(block, candidate.points) for block in code)):
        return without_tree(text, blocks, heads, options, "code" if code else None)
    splits = _splits(text, candidate.points, heads, options, options.max_depth)
    return Extraction(candidate.kind, None, build(0, len(text), splits))


def _in_detail(code: Block, points: list[Point]) -> bool:
    """Whether code is part of a detail: details do not see each other, and code builds on code."""
    return any(point.head_end <= code.start < point.detail_end for point in points)


def without_tree(text: str, blocks: list[Block], heads: Heads, options: Options, reason: str | None) -> Extraction:
    """A negative, or a dropped answer: one with structure that was not extracted would teach a model not to fork."""
    has_list = any(block.type == "list" for block in blocks)
    has_heading = any(block.type == "heading" or _level(text, block) == _TITLE_LEVEL for block in blocks)
    if reason == "code" and not has_list and signals.nothing_but_code(text):
        return _negative(text, reason)
    if reason in ("code", "maths", "markup", "verse"):
        if not has_list and not has_heading:
            return _negative(text, reason)
        return Extraction(None, f"{reason}_with_list" if has_list else f"{reason}_with_headings", None)
    if reason is not None:
        return Extraction(None, reason, None)
    if has_list:
        points = _list_points(blocks, heads)
        return Extraction(None, "few_points" if points else "points_without_detail", None)
    if has_heading:
        return Extraction(None, "few_sections", None)
    if any(block.type in ("table", "html", "quote", "rule", "code") for block in blocks):
        return Extraction(
            None, next(b.type for b in blocks if b.type in ("table", "html", "quote", "rule", "code")), None
        )
    if any(_has_inline_points(text[block.start : block.end]) for block in blocks):
        return Extraction(None, "points_in_a_line", None)
    if sum(_level(text, block) == _LABEL_LEVEL for block in blocks) >= 2:
        return Extraction(None, "few_sections", None)
    if len(_paragraph_points(blocks, heads)) >= 2:
        return Extraction(None, "few_paragraphs", None)
    return _negative(text, "plain")


def _negative(text: str, reason: str) -> Extraction:
    return Extraction("unstructured", reason, [TreeNode(0, len(text))])


def _never_forks(text: str, parsed: list[Block], blocks: list[Block], code: list[Block]) -> str | None:
    paragraphs = [block for block in blocks if block.type == "paragraph"]
    prose = _without(text, code)
    if signals.maths_in(prose):
        return "code" if code else "maths"
    if signals.bare_code_in(prose):
        return "code"
    if signals.verse_in(text, [block for block in parsed if block.type == "paragraph"]):
        return "verse"
    if signals.dialogue_in(text, paragraphs):
        return "dialogue"
    return "dependent_points" if signals.dependent(text) else None


def _without(text: str, code: list[Block]) -> str:
    parts, at = [], 0
    for block in sorted(code, key=lambda block: block.start):
        parts.append(text[at : block.start])
        at = block.end
    return "".join([*parts, text[at:]])


def _has_inline_points(text: str) -> bool:
    """Whether a paragraph counts 1. … 2. … 3. … in running text."""
    expected = 1
    for match in _INLINE_POINTS.finditer(" " + text):
        if int(match[1]) == expected:
            expected += 1
    return expected > 3


def _choose(
    text: str, blocks: list[Block], end: int, heads: Heads, options: Options, *, with_paragraphs: bool = True
) -> _Candidate | None:
    """The candidate with the shortest longest thread."""
    candidates = []
    points = _list_points(blocks, heads)
    num_items = sum(len(block.children) for block in blocks if block.type == "list")
    if len(points) * 2 >= num_items:
        candidates.append(_Candidate("list", points))
    candidates += [_Candidate("section", points) for points in _sections(text, blocks, end, heads)]
    if with_paragraphs:
        candidates.append(_Candidate("paragraph", _paragraph_points(blocks, heads, code_joins=options.code == "whole")))
    best, best_path = None, 0.0
    for candidate in candidates:
        if len(candidate.points) < options.min_points:
            continue
        path = _longest_thread(candidate.points, blocks[0].start, end)
        if candidate.kind == "paragraph":
            path /= _PARAGRAPH_MUST_WIN
        if best is None or path < best_path:
            best, best_path = candidate, path
    return best


def _longest_thread(points: list[Point], start: int, end: int) -> float:
    """Characters on the longest path from the root to a leaf."""
    longest, chain, at = 0, 0, start
    for point in points:
        chain += point.head_end - at
        longest = max(longest, chain + point.detail_end - point.head_end)
        at = point.detail_end
    return max(longest, chain + end - at)


def _splits(text: str, points: list[Point], heads: Heads, options: Options, depth: int) -> list[Split]:
    splits = []
    for point in points:
        inner: list[Split] = []
        if depth > 1 and point.blocks:
            candidate = _choose(text, point.blocks, point.detail_end, heads, options)
            if candidate is not None:
                inner = _splits(text, candidate.points, heads, options, depth - 1)
        splits.append(Split(point.head_end, point.detail_end, inner))
    return splits


def _list_points(blocks: list[Block], heads: Heads) -> list[Point]:
    points = []
    for block in blocks:
        if block.type == "list":
            for item in block.children:
                first_end = item.children[0].end if item.children else item.end
                head_end = heads.of_item(item.start, first_end, item.end)
                if head_end is not None:
                    inside = [part for part in item.children if part.start >= head_end]
                    points.append(Point(head_end, item.end, inside))
    return points


def _level(text: str, block: Block) -> int:
    """A heading's level, or that of a paragraph that serves as one; 0 for all else."""
    if block.type == "heading":
        return block.level
    if block.type != "paragraph" or block.end - block.start > 200:
        return 0
    line = text[block.start : block.end]
    if _BOLD_PARAGRAPH.fullmatch(line):
        return _TITLE_LEVEL
    if line[-1] in ":：" and len(line) <= 60 and len(line.split()) <= 8 and "\n" not in line and ". " not in line:
        return _LABEL_LEVEL
    return 0


def _sections(text: str, blocks: list[Block], end: int, heads: Heads) -> list[list[Point]]:
    """Points by level of heading: a heading, then all blocks up to the next one of its level or of a higher one."""
    levels = [_level(text, block) for block in blocks]
    found = []
    for level in sorted(set(levels) - {0}):
        starts = [index for index, other in enumerate(levels) if other == level]
        stops = [_next_heading(levels, index, level) for index in starts]
        if level >= _TITLE_LEVEL and stops[-1] == len(blocks):
            stops[-1] = _last_body(blocks, starts, stops)
        points = []
        for index, stop in zip(starts, stops, strict=True):
            body = blocks[index + 1 : stop]
            while body and body[-1].type == "rule":
                body.pop()
            if not body:
                continue
            detail_end = body[-1].end
            detail = text[blocks[index].end : detail_end].strip()
            if len(detail) >= heads.min_detail_chars and any(map(str.isalnum, detail)):
                points.append(Point(blocks[index].end, detail_end, body))
        found.append(points)
    return found


def _next_heading(levels: list[int], index: int, level: int) -> int:
    return next((after for after in range(index + 1, len(levels)) if 0 < levels[after] <= level), len(levels))


def _last_body(blocks: list[Block], starts: list[int], stops: list[int]) -> int:
    """Where the last section under a title ends: it goes on as long as its blocks are like those of the others."""
    types = {
        block.type for first, stop in zip(starts[:-1], stops[:-1], strict=True) for block in blocks[first + 1 : stop]
    }
    most = max((stop - first for first, stop in zip(starts[:-1], stops[:-1], strict=True)), default=len(blocks))
    at = starts[-1] + 1
    while at < min(stops[-1], starts[-1] + most) and blocks[at].type in types:
        at += 1
    return at


def _paragraph_points(blocks: list[Block], heads: Heads, *, code_joins: bool = False) -> list[Point]:
    """First sentence and rest of each paragraph, or its label and the rest.

    A list, quotation or table behind a paragraph belongs to its rest, and code where `code_joins`; a label on a line of
    its own belongs to the line behind it.
    """
    points: list[Point] = []
    label: Block | None = None
    indices = [
        index
        for index, block in enumerate(blocks)
        if block.type in _OWN_BLOCKS and not (code_joins and block.type == "code")
    ]
    for index, following in pairwise([*indices, len(blocks)]):
        block, before = blocks[index], label
        label = None
        if block.end - block.start < 60 and _BIBLIOGRAPHY.fullmatch(heads.text[block.start : block.end]):
            break
        if block.type != "paragraph":
            continue
        end = blocks[following - 1].end
        if following == index + 1 and following < len(blocks) and _labels(heads.text, block, blocks[following]):
            label = block
            continue
        if before is not None:
            point = Point(before.end, end, blocks[index:following])
            if end - block.start >= _MIN_PIECE_CHARS and heads.text[end - 1] not in ":：":
                points.append(point)
            continue
        head_end = heads.of_paragraph(block.start, block.end, end)
        if head_end is None or end - head_end < _MIN_PIECE_CHARS:
            continue
        head = heads.text[block.start : head_end].rstrip(BLANK)
        if len(head) < _MIN_PIECE_CHARS and head[-1] not in ":：*_":
            continue
        points.append(Point(head_end, end, blocks[index + 1 : following]))
    return points


def _labels(text: str, block: Block, following: Block) -> bool:
    """Whether a block is the label of the paragraph on the very next line."""
    between = text[block.end : following.start].replace("\r\n", "\n").replace("\r", "\n")
    return following.type == "paragraph" and between.count("\n") == 1 and _level(text, block) > 0
