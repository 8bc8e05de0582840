"""Hostile answers take time in proportion to their length: twice the text never takes many times as long."""

import time

import pytest
from extraction_support import extracted

NUM_CHARS = 10_000
NUM_ATTEMPTS = 5
MAX_RATIO = 10
SLACK_S = 0.1
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
    """Quadratic work takes 16 times as long in every attempt; a slow moment of the machine does not come five times."""
    ratios = []
    for _ in range(NUM_ATTEMPTS):
        short, long = (seconds((unit * num_chars)[:num_chars]) for num_chars in (NUM_CHARS, NUM_CHARS * 4))
        ratios.append((long - SLACK_S) / short)
        if ratios[-1] < MAX_RATIO:
            return
    pytest.fail(f"four times the text took {ratios} times as long in {NUM_ATTEMPTS} attempts")


def test_a_line_of_a_megabyte_is_read() -> None:
    assert seconds("word and. Word " * 70_000) < 60
    assert seconds("a" * 1_000_000) < 60


def test_deep_nesting_is_read() -> None:
    for marker in ("- ", "1. ", "> "):
        extracted("\n".join("   " * depth + marker + "head: the detail of it" for depth in range(300)), max_depth=9)
