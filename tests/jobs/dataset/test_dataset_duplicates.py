"""Duplicates: the first is kept, what is like it is not."""

import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jobs.dataset.duplicates import (
    LEAST_RECALL,
    NUM_PERMUTATIONS,
    ExactDuplicates,
    NearDuplicates,
    bands,
    normal_form,
    shingles,
)

WORDS = [f"word{n}" for n in range(400)]
texts = st.text(max_size=30)


def kept(finder: ExactDuplicates | NearDuplicates, found: list[str]) -> list[str]:
    return [text for text in found if finder.is_new(text)]


def jaccard(a: str, b: str, of: str = "words") -> float:
    one, other = shingles(a, of), shingles(b, of)
    return len(one & other) / len(one | other)


@hypothesis_settings(deadline=None)
@given(texts)
def test_a_normal_form_is_its_own_normal_form_but_for_rare_scripts(text: str) -> None:
    once = normal_form(text)
    # NFKC after case folding can still compose: then a second time is the last.
    assert normal_form(normal_form(once)) == normal_form(once)
    assert once == once.strip()


def test_case_width_and_white_space_do_not_count() -> None:
    assert normal_form("  Ｈello\t\nWORLD ") == normal_form("hello world") == "hello world"
    assert normal_form("Straße") == normal_form("STRASSE")
    assert normal_form("é") == normal_form(unicodedata.normalize("NFD", "é"))
    assert normal_form("a b") != normal_form("ab")


@hypothesis_settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "A ", "b", " b", "c", "", "ﬁ", "fi", "x y", "X\nY"])))
def test_exact_duplicates_keep_one_of_each_normal_form_and_it_is_the_first(found: list[str]) -> None:
    remaining = kept(ExactDuplicates(), found)
    first: dict[str, str] = {}
    for text in found:
        first.setdefault(normal_form(text), text)
    assert remaining == list(first.values())


@hypothesis_settings(deadline=None)
@given(st.text(max_size=60), st.sampled_from(["words", "chars"]))
def test_every_text_has_a_shingle_and_a_text_is_like_itself(text: str, of: str) -> None:
    assert shingles(text, of)
    finder = NearDuplicates(0.8, of)
    assert finder.is_new(text)
    assert not finder.is_new(text)


def test_shingles_are_runs_of_three_words_or_of_five_characters() -> None:
    assert shingles("One, two! three FOUR", "words") == {"one two three", "two three four"}
    assert shingles("Two words", "words") == {"two words"}
    assert shingles("?!", "words") == {"?!"}
    assert shingles("abcdef", "chars") == {"abcde", "bcdef"}
    assert shingles("ab", "chars") == {"ab"}
    assert shingles("", "words") == shingles("", "chars") == {""}


@hypothesis_settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_far_from_the_threshold_is_told_apart(seed: int) -> None:
    chance = random.Random(seed)
    original = [chance.choice(WORDS) for _ in range(120)]
    near, far = list(original), list(original)
    near[60] = "changed"
    for place in range(0, 120, 8):
        far[place] = "changed"
    base, alike, unlike = " ".join(original), " ".join(near), " ".join(far)
    assert jaccard(base, alike) > 0.94
    assert jaccard(base, unlike) < 0.5
    finder = NearDuplicates(0.8)
    assert [finder.is_new(text) for text in (base, alike, unlike, base.upper())] == [True, False, True, False]


def test_what_was_left_out_is_not_compared_with() -> None:
    """Or a chain of small changes would take everything with it, however far from what is kept."""
    words = list(WORDS[:200])
    finder, chain = NearDuplicates(0.8), []
    for step in range(12):
        chain.append(" ".join(words))
        words[step * 16 : step * 16 + 4] = [f"new{step}-{n}" for n in range(4)]
    remaining = kept(finder, chain)
    assert remaining[0] == chain[0]
    assert 1 < len(remaining) < len(chain)
    assert all(jaccard(a, b) < 0.9 for n, a in enumerate(remaining) for b in remaining[:n])


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text = "日本語の文章は単語の間に空白を置かないので文字の並びで比べる必要がある。" * 2
    other = text[:-2] + "い。"
    assert jaccard(text, other, "words") == 0
    assert jaccard(text, other, "chars") > 0.9
    finder = NearDuplicates(0.8, "chars")
    assert [finder.is_new(text), finder.is_new(other)] == [True, False]


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_the_index_proposes_what_is_at_the_threshold(threshold: float) -> None:
    number, length = bands(threshold)
    assert number * length <= NUM_PERMUTATIONS
    assert 1 - (1 - threshold**length) ** number >= LEAST_RECALL
    finder = NearDuplicates(threshold)
    assert [finder.is_new(text) for text in ("one two three four", "One two, three four", "x")] == [True, False, True]
