"""What can be seen to be wrong with a text by looking at it alone: repetition, loops, lists left unfinished.

The figures are cheap and crude on purpose. They tell two models' answers apart; they do not tell good from bad.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NGRAM = 4
MIN_SENTENCE_WORDS = 5
"""Shorter sentences come twice in good texts, too."""
MIN_LOOP_WORDS = 12
LOOP_TIMES = 3
MAX_PERIOD_WORDS = 100
MAX_HEADING_WORDS = 6

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|(?:(?![{_IDEOGRAPH}])\w)+")
_FENCE = re.compile(r"^\s*(```|~~~)")
_POINT = re.compile(r"^(?P<indent>[ \t]*)(?:(?P<number>\d{1,3})[.)]|(?P<bullet>[-*+•]))(?:[ \t]+(?P<text>.*))?$")
_MARKER = re.compile(r"^[ \t]*(?:\d{1,3}[.)]|[-*+•])[ \t]+", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|[。！？\n]")
_SECTION = re.compile(r"^\s{0,3}#{1,6}\s+\S")
_ALL_BOLD = re.compile(r"^(\*\*|__)[^*_]+(\*\*|__)[.:：]?$")


@dataclass(frozen=True, slots=True)
class TextQuality:
    """Figures of one text."""

    ngrams: int
    """Runs of 4 words, overlapping."""
    repeated_ngrams: int
    """Those that have been seen earlier in the text: all less distinct ones."""
    repeats_sentence: bool
    loops: bool
    unfinished_list: str | None
    """Why a list counts as unfinished, see `unfinished_list`; None where none does."""

    @property
    def repetition(self) -> float:
        """1 - distinct / all runs of 4 words; 0 for a text with fewer words."""
        return self.repeated_ngrams / self.ngrams if self.ngrams else 0.0


def text_quality(text: str) -> TextQuality:
    """All figures of a text."""
    total, repeated = repeated_ngrams(text)
    return TextQuality(total, repeated, repeats_sentence(text), has_loop(text), unfinished_list(text))


def words(text: str) -> list[str]:
    """Lower-case runs of letters, digits and underscores; an ideograph or syllable of East Asia is a word of its own.

    Punctuation is no word.
    """
    return _WORD.findall(text.lower())


def repeated_ngrams(text: str, n: int = NGRAM) -> tuple[int, int]:
    """How many runs of `n` words a text has, and how many of them are not the first of their kind."""
    found = words(text)
    runs = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
    return len(runs), len(runs) - len(set(runs))


def repeats_sentence(text: str) -> bool:
    """Whether a sentence of at least 5 words comes twice, code left out.

    Sentences end at a line's end, at 。！？ and at white space behind . ! ?; list markers, case and punctuation make no
    difference.
    """
    prose = "\n".join(line for line, in_code in _lines(text) if not in_code)
    sentences = (tuple(words(part)) for part in _SENTENCE_END.split(_MARKER.sub("", prose)))
    counts = Counter(sentence for sentence in sentences if len(sentence) >= MIN_SENTENCE_WORDS)
    return any(count > 1 for count in counts.values())


def has_loop(text: str) -> bool:
    """Whether some run of 1 to 100 words comes three times in succession and fills 12 words or more with that.

    List markers make no difference: a list whose numbers go up while its points stay the same is a loop.
    """
    found = words(_MARKER.sub("", text))
    for period in range(1, min(MAX_PERIOD_WORDS, len(found) // LOOP_TIMES) + 1):
        # A text of k equal runs agrees with itself, shifted by one run, over k - 1 of them.
        needed = max((LOOP_TIMES - 1) * period, MIN_LOOP_WORDS - period)
        same = 0
        for left, right in zip(found, found[period:], strict=False):
            same = same + 1 if left == right else 0
            if same >= needed:
                return True
    return False


def unfinished_list(text: str) -> str | None:
    """Why a text reads like a list, or an announcement of one, that does not go on; None where it does not.

    Looks at Markdown's numbered and bulleted points outside code. Whether the text was cut is not known here.

    - `marker`: a point is a marker with nothing behind it ("3.").
    - `empty_point`: a point is a heading with a colon ("2. **Rest**:") and the next point, a section's heading or the
      end follows at once.
    - `heading`: the text ends with a section's heading; or with a point that is all bold, while points before it are
      not; or with a point of at most 6 words without a colon and a full stop, while at least two points before it, and
      all of its list, have text behind a colon.
    - `colon`: the text ends with a colon.
    """
    lines = [(line, in_code) for line, in_code in _lines(text) if line.strip()]
    if not lines:
        return None
    points = [(i, match) for i, (line, in_code) in enumerate(lines) if not in_code and (match := _POINT.match(line))]
    numbered = False
    for place, match in points:
        point = _plain(match["text"] or "")
        is_bare = not point and (numbered or match["bullet"] or not _is_last(lines, place))
        numbered = numbered or match["number"] is not None
        if _goes_on(lines, place, match):
            continue
        if is_bare:
            return "marker"
        if point.endswith((":", "：")):
            return "empty_point"
    last, in_code = lines[-1]
    if in_code:
        return None
    if _plain(last).endswith((":", "：")):
        return "colon"
    if _SECTION.match(last):
        return "heading"
    if points and points[-1][0] == len(lines) - 1 and _stops_at_heading([match for _, match in points]):
        return "heading"
    return None


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a fenced block of code, fences included."""
    fence: str | None = None
    for line in text.splitlines():
        match = _FENCE.match(line)
        yield line, fence is not None or match is not None
        if match is not None:
            fence = match[1] if fence is None else None if match[1] == fence else fence


def _plain(text: str) -> str:
    """Without emphasis and space around it."""
    return text.strip(" \t*_")


def _is_last(lines: Sequence[tuple[str, bool]], place: int) -> bool:
    return place == len(lines) - 1


def _goes_on(lines: Sequence[tuple[str, bool]], place: int, point: re.Match[str]) -> bool:
    """Whether something that can be the point's text stands below it: no section and no point beside or above it."""
    if _is_last(lines, place):
        return False
    line, in_code = lines[place + 1]
    following = None if in_code else _POINT.match(line)
    if following is None:
        return in_code or not _SECTION.match(line)
    if (following["number"] is None) != (point["number"] is None):
        return following["number"] is None  # bullets below a number are often not indented
    return len(following["indent"].expandtabs(4)) > len(point["indent"].expandtabs(4))


def _stops_at_heading(points: Sequence[re.Match[str]]) -> bool:
    """Whether the last point is only a heading where its list's other points are more."""
    last = points[-1]
    kin = [
        point["text"] or ""
        for point in points[:-1]
        if point["indent"] == last["indent"] and (point["number"] is None) == (last["number"] is None)
    ]
    text = (last["text"] or "").strip()
    if _ALL_BOLD.match(text):
        return any(not _ALL_BOLD.match(other.strip()) for other in kin)
    is_short = len(words(text)) <= MAX_HEADING_WORDS and not re.search(r"[.!?:。！？：]", text)
    return is_short and len(kin) >= 2 and all(re.search(r"[:：][*_]*\s*\S", other) for other in kin)
