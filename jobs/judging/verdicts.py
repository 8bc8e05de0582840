"""Reads a judge's reply. What is not exactly a verdict is none: null, with the reason why, and never a default.

Two forms are read. Bare: the reply is a label and nothing else. With reasons: the last line is `Score: LABEL` (or
`Verdict: LABEL`) and no other place in the reply says `Score:`. Labels are compared character by character, so that
`5.`, `Five`, `５` and `5/10` are not 5. White space around the whole reply is ignored.
"""

import re
from dataclasses import dataclass
from typing import Literal

Problem = Literal["empty", "cut", "out_of_range", "several", "no_verdict"]
PROBLEMS: tuple[Problem, ...] = ("empty", "cut", "out_of_range", "several", "no_verdict")
PAIR_LABELS = ("A", "B", "tie")
MAX_REASON_CHARS = 400

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"[+-]?[0-9]+(?:[.,/][0-9]+)*")


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How the judge is to reply."""

    labels: tuple[str, ...]
    word: str
    """What stands in front of the label in the form with reasons: `Score` or `Verdict`."""
    reasons: bool = False

    def instruction(self) -> str:
        """What the rubric prints as `reply`."""
        what = f"a whole number from {self.labels[0]} to {self.labels[-1]}" if self.word == "Score" else "A, B or tie"
        if not self.reasons:
            return f"Reply with {what} and nothing else."
        return (
            'Reply with two lines. The first begins with "Reason: " and says why in one or two short sentences '
            f'without a colon. The second is "{self.word}: " with {what} behind it.'
        )

    def structured(self) -> dict[str, object]:
        """The same as a value of `sampling.structured`."""
        if not self.reasons:
            return {"choice": list(self.labels)}
        labels = "|".join(self.labels)  # letters and digits: nothing to escape
        # No colon in the reason: so it cannot say a second score.
        return {"regex": f"Reason: [^:\\n\\r]{{1,{MAX_REASON_CHARS}}}\\n{self.word}: ({labels})"}

    @property
    def max_tokens(self) -> int:
        """Room for the longest reply of this form. At worst a token is a byte, and a character four of them."""
        longest = max(map(len, self.labels)) + 1
        return longest + 8 if not self.reasons else longest + 4 * MAX_REASON_CHARS + 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """Either `label` or `problem` is set."""

    label: str | None = None
    problem: Problem | None = None


def score_form(low: int, high: int, reasons: bool = False) -> ReplyForm:
    return ReplyForm(tuple(map(str, range(low, high + 1))), "Score", reasons)


def pair_form(reasons: bool = False) -> ReplyForm:
    return ReplyForm(PAIR_LABELS, "Verdict", reasons)


def parse(reply: str, form: ReplyForm, finish_reason: str | None = "stop") -> Verdict:
    """The verdict of a reply.

    Args:
        finish_reason: other than `stop`, the reply was cut: a 1 may be the beginning of a 10.
    """
    text = reply.strip(_SPACE)
    if not text:
        return Verdict(problem="empty")
    if finish_reason != "stop":
        return Verdict(problem="cut")
    label: str | None = text
    if form.reasons:
        marker = f"{form.word}:"
        if len(re.findall(re.escape(marker), text, re.IGNORECASE)) > 1:
            return Verdict(problem="several")
        last_line = text.rpartition("\n")[2]
        label = last_line.removeprefix(f"{marker} ") if last_line.startswith(f"{marker} ") else None
    if label in form.labels:
        return Verdict(label=label)
    return Verdict(problem=_why(text if label is None else label, form))


def _why(text: str, form: ReplyForm) -> Problem:
    """What to call a reply that is no verdict; only for the count."""
    if form.word == "Score":
        numbers = _NUMBER.findall(text)
        if len(numbers) == 1 and numbers[0] == text and re.fullmatch("[+-]?[0-9]+", text):
            return "out_of_range"
        return "several" if len([number for number in numbers if number in form.labels]) > 1 else "no_verdict"
    found = re.findall(r"\b(?:A|B|tie)\b", text)
    return "several" if len(set(found)) > 1 else "no_verdict"
