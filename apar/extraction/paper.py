"""The `paper` rules: ordered lists with colons, else paragraphs by their first sentence.

Receives an answer; hands on its tree, or why it has none. The rules are the paper's; the tree is ours: its nodes are
spans, so that nothing is lost between them.

Source: APAR paper, section 3.4.3 and appendix B.
"""

import re

from apar.extraction.blocks import BLANK, parse
from apar.extraction.heads import Heads
from apar.extraction.markdown import without_tree
from apar.extraction.options import Extraction, Options
from apar.extraction.outline import outline
from apar.extraction.protected import Protected
from apar.extraction.structure import Split, build

_POINT = re.compile(r"^(\d+\.)[ \t]+([^\r\n:：]+)[:：](?=[^\r\n])", re.MULTILINE)
_NUMBER = re.compile(r"^[ \t]*\d+\.[ \t]", re.MULTILINE)
_BLANK_LINE = re.compile(r"(?:\r\n?|\n)[ \t]*(?:\r\n?|\n)")
_SENTENCE = re.compile(r"\.(?=[ \n])|。")
_TITLES = re.compile(r"\b(?:mr|mrs|dr)\.", re.IGNORECASE)
_MIN_PIECE_CHARS = 20
_AMBIGUOUS = (
    ("code", re.compile(r"```")),
    ("maths", re.compile(r"\$\$|=")),
    ("markup", re.compile(r"[<>]|---")),
    ("url", re.compile(r"http")),
    ("cjk", re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")),
)


def extract_paper(text: str, options: Options) -> Extraction:
    """Extract by the paper's rules; what its patterns call ambiguous is never a tree."""
    reason = next((name for name, pattern in _AMBIGUOUS if pattern.search(text)), None)
    if reason is None:
        splits = _points(text, options)
        if splits is not None:
            return Extraction("list", None, build(0, len(text), splits))
        splits = _paragraphs(text, options)
        if splits is not None:
            return Extraction("paragraph", None, build(0, len(text), splits))
    heads = Heads(text, Protected(text), options.min_detail_chars)
    return without_tree(text, outline(text, parse(text), heads), heads, options, reason)


def _points(text: str, options: Options) -> list[Split] | None:
    """Splits of an ordered list: at least three points, each with a colon and a detail that is long enough."""
    points = list(_POINT.finditer(text))
    if len(points) < options.min_points or len(_NUMBER.findall(text)) != len(points):
        return None  # too few, or numbers without a colon, or numbers within points
    splits = []
    for index, point in enumerate(points):
        if index + 1 < len(points):
            stop = points[index + 1].start()
        else:  # the last point ends at a blank line, or with the text
            blank = _BLANK_LINE.search(text, point.end())
            stop = blank.start() if blank is not None else len(text)
        end = point.end() + len(text[point.end() : stop].rstrip(BLANK))
        if len(text[point.end() : end].strip()) < options.min_detail_chars:
            return None
        splits.append(Split(point.end(), end))
    return splits


def _paragraphs(text: str, options: Options) -> list[Split] | None:
    """Splits behind the first sentences of at least three paragraphs."""
    if _TITLES.search(text):
        return None
    splits, at, num_paragraphs = [], 0, 0
    for start, following in [*(match.span() for match in _BLANK_LINE.finditer(text)), (len(text), len(text))]:
        end = at + len(text[at:start].rstrip(BLANK))
        num_paragraphs += end > at
        sentence = _SENTENCE.search(text, at, end)
        if sentence is not None:
            head_end = sentence.end()
            head, detail = text[at:head_end].strip(), text[head_end:end].strip()
            if min(len(head), len(detail)) >= _MIN_PIECE_CHARS:
                splits.append(Split(head_end, end))
        at = following
    return splits if len(splits) >= options.min_points and num_paragraphs >= 3 else None
