"""Which of a model's answers are worth learning from, and how far. Small models loop, stop, say nothing."""

import re
from dataclasses import dataclass

from apar.extraction.protected import Protected
from apar.extraction.sentences import first_sentence_end

NGRAM_WORDS = 4
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Selected:
    """An answer to learn from, or why it is none."""

    text: str | None
    complete: bool = True
    """False: the answer goes on where the text ends, so nothing is to be learnt about ending there."""
    reason: str | None = None
    """`failed`, `empty`, `repetitive` or `cut`; None for an answer to learn from."""


def select(text: str | None, finish_reason: str | None, *, max_repetition: float, min_words: int) -> Selected:
    """Judge one answer.

    An answer that begins to loop is kept up to there, and one that `max_tokens` cut off up to its last whole line, if
    `min_words` remain.

    Args:
        max_repetition: the largest `repetition` of a line, given all before it, and of the whole that passes.
    """
    if text is None or finish_reason is None:
        return Selected(None, reason="failed")
    whole = text.rstrip()
    if not whole:
        return Selected(None, reason="empty")
    kept = _before_loop(whole, max_repetition)
    loops = kept != whole
    if finish_reason == "length" and not loops:
        kept = whole[: whole.rfind("\n") + 1]
    complete = kept == whole
    if not complete and count_words(kept) < min_words:
        return Selected(None, reason="repetitive" if loops else "cut")
    if _repetition(kept, set()) > max_repetition:
        return Selected(None, reason="repetitive")
    return Selected(kept, complete)


def count_words(text: str) -> int:
    """Words and punctuation marks."""
    return len(_WORD.findall(text))


def _before_loop(text: str, max_repetition: float) -> str:
    """The text before the first line that mostly says what was said; the text itself where there is none.

    Of that line the sentences stay that say something new, and behind them the line break that is before it: what is
    learnt there is to end the paragraph where the loop would begin.
    """
    seen: set[tuple[str, ...]] = set()
    end = 0
    for line in text.splitlines(keepends=True):
        if _repetition(line, seen) > max_repetition:
            stays = _new_sentences(line, text[:end], max_repetition)
            breaks = text[len(text[:end].rstrip("\n")) : end] or "\n\n"
            return text[:end] + (stays + breaks if stays else "")
        end += len(line)
    return text


def _new_sentences(line: str, before: str, max_repetition: float) -> str:
    """The sentences before the first one that mostly says what was said."""
    seen: set[tuple[str, ...]] = set()
    _repetition(before, seen)
    protected, end = Protected(line), 0
    while (stop := first_sentence_end(line, end, len(line), protected)) is not None:
        if _repetition(line[end:stop], seen) > max_repetition:
            break
        end = stop
    return line[:end]


def _repetition(text: str, seen: set[tuple[str, ...]]) -> float:
    """Share of a text's word 4-grams that are in `seen` or come again; 0 for most prose, near 1 for a loop.

    `seen` gets what is new.
    """
    words = [word.lower() for word in _WORD.findall(text)]
    grams = [tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)]
    before = len(seen)
    seen.update(grams)
    return 1 - (len(seen) - before) / len(grams) if grams else 0.0
