"""Hostile answers take time in proportion to their length: twice the text never takes many times as long."""

import time

import pytest
from extraction_support import extracted

NUM_CHARS = 10_000
UNITS = {
    "words": "word ",
    "letters": "a",
    "blanks": " ",
    "newlines": "\n",
    "sentences": "A sentence here. ",
    "no spaces": "A.B",
    "backticks": "`",
    "runs of backticks": "`a ``b ",
    "brackets": "[",
    "open links": "[a](",
    "angles": "<a ",
    "dollars": "$a_ ",
    "open maths": "\\(",
    "environments": "\\begin{a}",
    "numbers": "1.",
    "at signs": "a@",
    "nested bullets": "- ",
    "bullets": "- a\n",
    "points": "1. Head: detail of it\n",
    "nested quotes": "> ",
    "headings": "## A\n\nText of the section.\n\n",
    "fences": "```\n",
    "tables": "|a|b|\n|-|-|\n",
    "html": "<div>\n",
    "stars": "**a ",
    "labels": "Label:\n\n- a b c d e f g\n\n",
    "quotes": "“a. ",
    "full width": "你好。",
    "semicolons": "; ",
    "equations": "a = ",
    "calculations": "1 times ",
    "speakers": "Bob: hi\n",
    "lists by turns": "1. a\n- b\n",
    "lazy lines": "1. Head: text.\nA lazy line.\n",
    "backslashes": "\\",
    "zeros": "\0",
}


def seconds(text: str) -> float:
    started = time.process_time()
    extracted(text, max_chars=len(text), max_depth=3, code="whole")
    extracted(text, "paper", max_chars=len(text))
    return time.process_time() - started


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
def test_time_grows_no_faster_than_the_text(unit: str) -> None:
    short = min(seconds((unit * NUM_CHARS)[:NUM_CHARS]) for _ in range(2))
    long = seconds((unit * NUM_CHARS * 4)[: NUM_CHARS * 4])
    assert long < 10 * short + 0.3


def test_a_line_of_a_megabyte_is_read() -> None:
    assert seconds("word and. Word " * 70_000) < 60
    assert seconds("a" * 1_000_000) < 60


def test_deep_nesting_is_read() -> None:
    for marker in ("- ", "1. ", "> "):
        extracted("\n".join("   " * depth + marker + "head: the detail of it" for depth in range(300)), max_depth=9)
