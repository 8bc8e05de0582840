"""Filters: an answer is kept, or left out for the first reason there is."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jobs.dataset.filters import REASONS, Answer, Filters
from jobs.dataset.options import ExportOptions
from jobs.errors import BadInput

CATASTROPHIC = r"(?:a|aa|aaa)+$"
"""Tries a number of ways that grows exponentially with the a's, where something else follows them."""

answers = st.builds(
    Answer,
    text=st.text(max_size=40),
    num_tokens=st.integers(0, 50),
    finish_reasons=st.lists(st.sampled_from(["stop", "length", None]), min_size=1, max_size=3).map(tuple),
)
bounds = st.tuples(*[st.none() | st.integers(0, 45)] * 2).filter(
    lambda pair: None in pair or pair[0] <= pair[1]  # type: ignore[operator]
)


def bounded(chars: tuple[int | None, int | None], tokens: tuple[int | None, int | None], **said: Any) -> ExportOptions:
    limits = {"min_chars": chars[0], "max_chars": chars[1], "min_tokens": tokens[0], "max_tokens": tokens[1]}
    return ExportOptions(**limits, **said)  # type: ignore[arg-type]


options = st.builds(
    bounded,
    chars=bounds,
    tokens=bounds,
    finish_reason=st.sampled_from([[], ["stop"], ["length"], ["stop", "length"]]),
    match=st.sampled_from([[], ["a"], ["a", "b"]]),
    no_match=st.sampled_from([[], ["x"], [r"\d", "x"]]),
)


def plainly_kept(said: ExportOptions, answer: Answer) -> bool:
    """The same judgement in the shortest words, without an order."""
    return (
        (not said.finish_reason or {*answer.finish_reasons} <= {*said.finish_reason})
        and (said.min_chars or 0) <= len(answer.text)
        and (said.max_chars is None or len(answer.text) <= said.max_chars)
        and (said.min_tokens or 0) <= answer.num_tokens
        and (said.max_tokens is None or answer.num_tokens <= said.max_tokens)
        and all(re.search(pattern, answer.text) for pattern in said.match)
        and not any(re.search(pattern, answer.text) for pattern in said.no_match)
    )


@hypothesis_settings(deadline=None)
@given(options, answers)
def test_an_answer_is_kept_exactly_where_every_filter_lets_it_through(said: ExportOptions, answer: Answer) -> None:
    reason = Filters(said).reason(answer)
    assert (reason is None) == plainly_kept(said, answer)
    assert reason in (None, *REASONS)


@hypothesis_settings(deadline=None)
@given(options, answers)
def test_the_reason_is_the_first_filter_that_alone_would_leave_the_answer_out(
    said: ExportOptions, answer: Answer
) -> None:
    reason = Filters(said).reason(answer)
    alone = [
        name
        for name in REASONS[:-1]
        if Filters(ExportOptions(**{name: getattr(said, name)})).reason(answer) is not None
    ]
    assert reason == (alone[0] if alone else None)


def test_an_answer_of_several_turns_must_have_ended_well_in_each() -> None:
    filters = Filters(ExportOptions(finish_reason=["stop"]))
    assert filters.reason(Answer("x", 1, ("stop", "stop"))) is None
    assert filters.reason(Answer("x", 1, ("length", "stop"))) == "finish_reason"


def test_an_expression_that_never_ends_leaves_its_answer_out_and_no_other() -> None:
    filters = Filters(ExportOptions(match=[CATASTROPHIC]), timeout_s=0.05)
    assert filters.reason(Answer("a" * 5000 + "!", 1, ("stop",))) == "match_timeout"
    assert filters.reason(Answer("aaa", 1, ("stop",))) is None
    assert filters.reason(Answer("b", 1, ("stop",))) == "match"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"match": ["a", "("]}, r"--match '\(' is no regular expression \(missing \) at position 1\)"),
        (
            {"no_match": ["[z-a]"]},
            r"--no-match '\[z-a\]' is no regular expression \(bad character range at position 4\)",
        ),
        ({"match": ["x" * 100 + "("]}, r"--match 'x{57}\.\.\.' is no regular expression"),
    ],
)
def test_a_bad_expression_is_refused_with_one_line(said: dict[str, list[str]], message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        Filters(ExportOptions(**said))
    assert "\n" not in str(raised.value)
