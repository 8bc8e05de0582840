"""Where a point's head ends and its detail begins.

Receives the span of a list item or a paragraph; hands on the offset behind its head. In this order a head is: a bold or
italic title, what stands before a colon, what stands before a dash, a first line of its own, the first sentence.
"""

import re
from dataclasses import dataclass

from apar.extraction.protected import Protected
from apar.extraction.sentences import first_sentence_end

_MAX_LABEL_CHARS = 120
_MAX_PARAGRAPH_LABEL_CHARS = 60
_MAX_DASH_LABEL_CHARS = 70
_EMPHASIS = re.compile(r"(?:\[[ xX]\] )?(?:[\"“(]?)(\*{1,3}|_{2,3})(?=[^\s*_])([^*_\n]{1,150}?)\1")
_AFTER_TITLE = re.compile(r"[ \t]?[:：]|[ \t]+(?:-{1,2}|[–—])(?=[ \t])|[–—](?=\w)")
_COLON = re.compile(r"[:：]")
_DASH = re.compile(r"[ \t](?:-{1,2}|[–—])(?=[ \t])")
_LINE_END = re.compile(r"[\r\n]")
_SENTENCE_END = re.compile(r"[.!?。！？](?:\s|$)")
_TITLE_END = ":：.!?"


@dataclass(frozen=True, slots=True)
class Heads:
    """Finds heads in one text."""

    text: str
    protected: Protected
    min_detail_chars: int

    def of_item(self, start: int, first_end: int, end: int) -> int | None:
        """The head of a list item in [start, end) whose first paragraph ends at `first_end`."""
        line_end = self._line_end(start, first_end)
        for head_end in (
            self._title(start, line_end),
            self._colon(start, line_end, _MAX_LABEL_CHARS),
            self._dash(start, line_end),
            self._own_line(start, line_end, end),
            self._sentence(start, first_end, end),
        ):
            if head_end is not None and self._fits(head_end, end):
                return head_end
        return None

    def of_paragraph(self, start: int, first_end: int, end: int) -> int | None:
        """The head of a paragraph with what is attached to it: its title, its short label, or its first sentence."""
        line_end = self._line_end(start, first_end)
        for head_end in (
            self._title(start, line_end),
            self._titled_line(start, line_end, first_end, end),
            self._label(start, line_end, first_end),
            self._sentence(start, first_end, end),
        ):
            if head_end is not None and self._fits(head_end, end):
                return head_end
        return None

    def _fits(self, head_end: int, end: int) -> bool:
        """Whether the detail has substance, and does not only announce what stands behind it."""
        detail = self.text[head_end:end].strip()
        if len(detail) < self.min_detail_chars or detail[-1] in ":：":
            return False
        return any(map(str.isalnum, detail[:200]))

    def _line_end(self, start: int, end: int) -> int:
        found = _LINE_END.search(self.text, start, end)
        return end if found is None else found.start()

    def _title(self, start: int, end: int) -> int | None:
        title = _EMPHASIS.match(self.text, start, end)
        if title is None or not any(map(str.isalnum, title[2])):
            return None
        at = title.end()
        if title[2].rstrip()[-1] in _TITLE_END:
            return at
        after = _AFTER_TITLE.match(self.text, at, end)
        if after is not None:
            return after.end()
        rest = self.text[at:end].strip()
        if not rest:
            return end if end > at else at
        label = self._colon(at, end, 60)  # **Title** (1999): …
        if label is not None and rest[0] in "(-–—,[/&":
            return label
        # **Title** Sentence: only where both begin in upper case; else it is a word in bold
        if (
            len(title[1]) >= 2
            and self.text[at : at + 1] == " "
            and rest[0].isupper()
            and title[2][0].isupper()
            and " " in rest
        ):
            return (
                at
                if len(title[2]) >= 4 and len(rest.split(maxsplit=2)) == 3 and rest.split()[1][:1].islower()
                else None
            )
        return None

    def _colon(self, start: int, end: int, most: int) -> int | None:
        """Behind the first colon that white space follows, if no sentence ends before it."""
        stop = min(end, start + most)
        for colon in _COLON.finditer(self.text, start, stop):
            at = colon.end()
            if self.protected.holds(at) or self.protected.holds(at - 1) or self._in_parentheses(start, at):
                continue
            while self.text[at : at + 1] in ("*", "_", '"', "”") and at < end:  # *Head:* and "Head:"
                at += 1
            if at < end and not self.text[at].isspace() and colon[0] != "：":
                continue
            return (
                None
                if self._sentence_in(start, colon.start()) or not self.text[start : colon.start()].strip("*_ ")
                else at
            )
        return None

    def _dash(self, start: int, end: int) -> int | None:
        """Behind the first dash with space on both sides, unless a second one makes the two a parenthesis."""
        dash = _DASH.search(self.text, start, min(end, start + _MAX_DASH_LABEL_CHARS))
        if dash is None or self.protected.holds(dash.end()) or self._sentence_in(start, dash.start()):
            return None
        if self._in_parentheses(start, dash.start()):
            return None
        if dash.start() == start or len(self.text[start : dash.start()].split()) > 8:
            return None
        sentence_end = first_sentence_end(self.text, dash.end(), end, self.protected) or end
        if _DASH.search(self.text, dash.end(), sentence_end) is not None:
            return None
        return dash.end()

    def _label(self, start: int, end: int, first_end: int) -> int | None:
        """A paragraph's label: a few words before a colon, and more behind it than a value."""
        at = self._colon(start, end, _MAX_PARAGRAPH_LABEL_CHARS)
        if at is None or len(self.text[start:at].split()) > 8 or first_end - at < 40:
            return None
        return None if self.text[at:first_end].lstrip()[:1].islower() else at  # a sentence goes on

    def _titled_line(self, start: int, line_end: int, first_end: int, end: int) -> int | None:
        """A paragraph's first line that is its title: short, without a sentence's end, before sentences or a list."""
        line = self.text[start:line_end].rstrip()
        if not 0 < len(line) <= 100 or line[-1] in ".!?,;…" or self._sentence_in(start, line_end):
            return None
        rest = self.text[line_end:first_end].strip()
        if rest and (len(rest) < 40 or rest[0].islower() or not _SENTENCE_END.search(rest)):
            return None
        return start + len(line) if rest or first_end < end else None

    def _own_line(self, start: int, line_end: int, end: int) -> int | None:
        """A first line that stands alone: short, without a sentence's end, and followed by more."""
        line = self.text[start:line_end].rstrip()
        if (
            start + len(line) >= end
            or len(line) > 150
            or first_sentence_end(self.text, start, line_end, self.protected)
        ):
            return None
        return start + len(line)

    def _sentence(self, start: int, first_end: int, end: int) -> int | None:
        found = first_sentence_end(self.text, start, first_end, self.protected)
        if found is not None:
            return found
        return first_end if first_end < end else None

    def _in_parentheses(self, start: int, at: int) -> bool:
        return self.text.count("(", start, at) > self.text.count(")", start, at)

    def _sentence_in(self, start: int, end: int) -> bool:
        return first_sentence_end(self.text, start, end, self.protected) is not None
