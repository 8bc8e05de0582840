"""Which answers are kept: how they ended, how long they are, and what is written in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.dataset.options import ExportOptions
from jobs.errors import BadInput
from jobs.source import first_line

MATCH_TIMEOUT_S = 1.0
"""For one expression on one answer: some expressions take longer than anyone waits, on texts that a model wrote."""
REASONS = (
    "finish_reason", "min_chars", "max_chars", "min_tokens", "max_tokens", "match", "no_match", "match_timeout",
)  # fmt: skip
"""Why an answer may be left out, in the order in which it is looked at; it is counted under the first alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the filters see of a sample."""

    text: str
    """Of the last turn."""
    num_tokens: int
    finish_reasons: tuple[str | None, ...]
    """Of every turn: an answer that was cut is in the conversation of those after it."""


class Filters:
    """Compiled once for a whole export."""

    def __init__(self, options: ExportOptions, timeout_s: float = MATCH_TIMEOUT_S) -> None:
        """
        Raises:
            BadInput: an expression does not compile.
        """
        self._options = options
        self._timeout_s = timeout_s
        self._must = [_compiled(pattern, "match") for pattern in options.match]
        self._may_not = [_compiled(pattern, "no-match") for pattern in options.no_match]

    def reason(self, answer: Answer) -> str | None:
        """Why the answer is left out, one of `REASONS`, or None where it is kept."""
        for name, holds in self._bounds(answer):
            if not holds:
                return name
        try:
            if not all(self._found(pattern, answer.text) for pattern in self._must):
                return "match"
            if any(self._found(pattern, answer.text) for pattern in self._may_not):
                return "no_match"
        except TimeoutError:
            return "match_timeout"
        return None

    def _bounds(self, answer: Answer) -> Sequence[tuple[str, bool]]:
        said = self._options
        num_chars, num_tokens = len(answer.text), answer.num_tokens
        return (
            ("finish_reason", not said.finish_reason or all(r in said.finish_reason for r in answer.finish_reasons)),
            ("min_chars", said.min_chars is None or num_chars >= said.min_chars),
            ("max_chars", said.max_chars is None or num_chars <= said.max_chars),
            ("min_tokens", said.min_tokens is None or num_tokens >= said.min_tokens),
            ("max_tokens", said.max_tokens is None or num_tokens <= said.max_tokens),
        )

    def _found(self, search: Callable[..., Any], text: str) -> bool:
        return search(text, timeout=self._timeout_s) is not None


def _compiled(pattern: str, what: str) -> Callable[..., Any]:
    import regex

    try:
        search: Callable[..., Any] = regex.compile(pattern).search
    except (regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
        shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
        raise BadInput(f"--{what} {shown!r} is no regular expression ({first_line(error)}): correct it") from None
    return search
