"""Spans of a text that no boundary may fall into: inline code, maths, links, addresses, HTML tags, numbers.

Every pattern reads each character a bounded number of times: none has two ways to match the same text.
"""

import re
from bisect import bisect_left, bisect_right

_PATTERNS = [
    re.compile(
        r"!?\[[^\[\]\n]{0,400}\](?:\([^()\n]{0,600}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?\)|\[[^\[\]\n]{0,200}\])"
    ),
    re.compile(r"<[A-Za-z/!][^<>\n]{0,400}>"),
    re.compile(r"(?:https?|ftp)://[^\s<>]+|\bwww\.[^\s<>]+"),
    re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}"),
    re.compile(r"\$\$[^$]{1,2000}\$\$|(?<![\w$\\])\$(?=[^\s$])[^$\n]{1,300}(?<=[^\s\\])\$(?![\w$])"),
    re.compile(r"\\\([^\n]{0,600}?\\\)|\\\[[^\[\]]{0,1000}?\\\]"),
    re.compile(r"\d[\d.,:/]*\d"),
]
_BACKTICKS = re.compile(r"`+")


class Protected:
    """The protected spans of a text, merged and in order."""

    def __init__(self, text: str) -> None:
        spans = [*_code_spans(text), *_environments(text)]
        for pattern in _PATTERNS:
            spans += [match.span() for match in pattern.finditer(text)]
        self.starts: list[int] = []
        self.ends: list[int] = []
        for start, end in sorted(spans):
            if self.ends and start < self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def holds(self, offset: int) -> bool:
        """Whether a boundary at `offset` would cut a protected span in two."""
        index = bisect_left(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def next_free(self, offset: int) -> int:
        """`offset`, or the end of the protected span that begins at or holds it."""
        index = bisect_right(self.starts, offset) - 1
        return self.ends[index] if index >= 0 and offset < self.ends[index] else offset


def _code_spans(text: str) -> list[tuple[int, int]]:
    """Inline code: a run of backticks up to the next run of the same length, before a blank line ends the paragraph."""
    runs = [match.span() for match in _BACKTICKS.finditer(text)]
    following: dict[int, int] = {}
    partner = [-1] * len(runs)
    for index in range(len(runs) - 1, -1, -1):
        length = runs[index][1] - runs[index][0]
        partner[index] = following.get(length, -1)
        following[length] = index
    spans, index = [], 0
    while index < len(runs):
        other = partner[index]
        start = runs[index][0]
        if other >= 0 and "\n\n" not in text[runs[index][1] : min(runs[other][0], runs[index][1] + 4000)]:
            spans.append((start, runs[other][1]))
            index = other + 1
        else:
            index += 1
    return spans


def _environments(text: str) -> list[tuple[int, int]]:
    """From the first LaTeX `\\begin` to the last `\\end`."""
    start, stop = text.find("\\begin{"), text.rfind("\\end{")
    if not 0 <= start < stop:
        return []
    close = text.find("}", stop)
    return [(start, close + 1 if close >= 0 else len(text))]
