"""Where the first sentence of a stretch of text ends.

Boundaries come from sentencex; what it proposes is refused inside protected spans and behind what is no end: an initial
or a list label, an abbreviation that a number follows, a word that goes on in lower case. docs/extraction.md compares
the splitters and says why this one.
"""

import re

from apar.extraction.protected import Protected

_WINDOW = 4000
"""A first sentence longer than this is none: the splitter never sees more, so its cost per boundary is bounded."""
_CLOSERS = "\"'”’»)]*_"
_TERMINALS = ".!?…。！？．:;"
_NO_END = re.compile(
    r"(?:(?:^|[\s(\[“\"'*])(?:[A-Za-z]|vol|no|nos|fig|figs|eq|eqs|sec|ch|pp|ed|eds|approx|vs|etc|cf|dept|est|rs"
    r"|\((?:19|20)\d\d\)|e\.g|i\.e|a\.k\.a|mr|mrs|ms|dr|st|prof|inc|jr|sr|u\.s|u\.k)\."
    r"|(?:^|[.!?:;,] )(?:\d{1,3}|[ivx]{1,4})\."  # the label of a point
    r"|\.\.\.|…)[\"'”’)\]*_]*$",
    re.IGNORECASE,
)


def first_sentence_end(text: str, start: int, end: int, protected: Protected) -> int | None:
    """The offset behind the first sentence in [start, end), or None where there is no second sentence."""
    import sentencex  # type: ignore[import-untyped]

    window = text[start : min(end, start + _WINDOW)]
    at = 0
    for segment in sentencex.segment("en", window):
        at += len(segment)
        if at >= len(window):
            return None
        offset = start + len(window[:at].rstrip())
        if _is_boundary(text, start, offset, end, protected):
            return offset
    return None


def _is_boundary(text: str, start: int, offset: int, end: int, protected: Protected) -> bool:
    if offset <= start or offset >= end or protected.holds(offset):
        return False
    before = text[max(start, offset - 24) : offset]
    if before.rstrip(_CLOSERS)[-1:] not in tuple(_TERMINALS) or _NO_END.search(before):
        return False
    after = text[offset : offset + 80].lstrip()
    return bool(after) and not after[0].islower() and after[0] not in ",;:.)]}!?…"
