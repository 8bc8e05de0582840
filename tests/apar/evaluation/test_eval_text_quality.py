"""What counts as repetition, a loop and an unfinished list, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar.evaluation.text_quality import (
    has_loop,
    repeated_ngrams,
    repeats_sentence,
    text_quality,
    unfinished_list,
    words,
)


def test_words_have_no_case_and_no_punctuation_and_ideographs_stand_alone() -> None:
    assert words("Don't **Stop**, e.g. 3.14!") == ["don", "t", "stop", "e", "g", "3", "14"]
    assert words("时间管理 skills は") == ["时", "间", "管", "理", "skills", "は"]


@pytest.mark.parametrize(
    ("text", "total", "repeated"),
    [
        ("", 0, 0),
        ("one two three", 0, 0),
        ("one two three four", 1, 0),
        ("a b c d a b c d", 5, 1),  # abcd bcda cdab dabc abcd
        ("a a a a a a", 3, 2),
        ("A, b; C. d? a b c D!", 5, 1),
    ],
)
def test_repetition_counts_runs_of_four_words_seen_before(text: str, total: int, repeated: int) -> None:
    assert repeated_ngrams(text) == (total, repeated)
    assert text_quality(text).repetition == (repeated / total if total else 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Plan each day in advance. Rest. Plan each day in advance!", True),
        ("1. Plan each day in advance\n2. plan each day, in advance.", True),
        ("Yes it is. Yes it is.", False),  # 3 words
        ("Plan each day in advance. Plan each day in time.", False),
        ("```\nprint a b c d\nprint a b c d\n```", False),  # code may
    ],
)
def test_a_sentence_of_five_words_may_come_once(text: str, expected: bool) -> None:
    assert repeats_sentence(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so " * 11, False),  # 11 words
        ("so " * 12, True),
        ("we plan our day and " * 2, False),
        ("we plan our day and " * 3, True),
        ("First. " + "we plan our day and " * 3 + "then it is over.", True),
        ("we plan our day and " * 2 + "we plan our day", False),  # one word short of three times
        ("a b c d " * 3, True),  # 12 words
        ("a b c " * 3, False),  # 9 words
        ("\n".join(f"{i}. Drink more water today" for i in range(1, 4)), True),
        ("\n".join(f"{i}. Drink {i} glasses of water" for i in range(1, 9)), False),
    ],
)
def test_a_loop_is_three_times_the_same_in_succession(text: str, expected: bool) -> None:
    assert has_loop(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 42.",
        "42.",
        "1. **Plan**: make lists.\n2. **Rest**: sleep.",
        "1. **Plan**:\n   Make lists.\n2. **Rest**:\n\n   Sleep.",
        "1. **Plan**:\n- Make lists.\n- Keep them.\n2. **Rest**:\n- Sleep.",
        "- Plan:\n  - lists\n- Rest:\n  - sleep\n\nThat is all.",
        "Buy:\n1. apples\n2. pears",
        "1. Plan: lists\n2. Rest: sleep\n3. That is all there is to be said about it",
        "Steps:\n```python\ndef f():\n",  # cut inside code
        "Use this:\n```\n1.\n```",
        "# Title\n\nText.\n\n---\n\nMore - and more.",
        "#include <cstdlib>\n#",  # code without a fence, cut
        "**Plan**\n\n1. **Lists**\n2. **Rest**",  # all points are bold: a list of names
    ],
)
def test_finished_lists_are_finished(text: str) -> None:
    assert unfinished_list(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Here are five tips:", "colon"),
        ("Here are five tips：\n\n", "colon"),
        ("Do this. **Note:**", "colon"),
        ("1. **Plan**: lists.\n2. **Rest**:", "empty_point"),
        ("1. **Plan**:\n2. **Rest**: sleep.", "empty_point"),
        ("1. Plan:\n\n2. Rest:\n\nSleep.", "empty_point"),
        ("1. Plan: lists.\n2. Rest:\n\n### Summary\n\nDo it.", "empty_point"),
        ("- Plan:\n- Rest: sleep.", "empty_point"),
        ("1. Plan: lists.\n2.", "marker"),
        ("1. Plan: lists.\n2.\n3. Rest: sleep.", "marker"),
        ("1. **Plan**: lists.\n2. **Rest**", "heading"),
        ("1. Plan: lists.\n2. Rest: sleep.\n3. Good food", "heading"),
        ("## Plan\n\nLists.\n\n## Rest", "heading"),
    ],
)
def test_lists_that_stop_before_their_text_are_unfinished(text: str, reason: str) -> None:
    assert unfinished_list(text) == reason


@given(st.text(alphabet=st.sampled_from("ab 1.:-*#`\n："), max_size=80))
def test_every_text_has_its_figures(text: str) -> None:
    quality = text_quality(text)
    assert 0 <= quality.repeated_ngrams <= max(0, quality.ngrams - 1)
    assert quality.unfinished_list in (None, "marker", "empty_point", "heading", "colon")
    assert text_quality(text + "\n\n") == quality
