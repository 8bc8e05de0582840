"""The parser of judges' replies: exact on what is well formed, null on everything else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed import CUT, MALFORMED, TRICKY

from jobs.judging.verdicts import MAX_REASON_CHARS, PROBLEMS, ReplyForm, pair_form, parse, score_form

FORMS = [form for reasons in (False, True)
         for form in (score_form(1, 5, reasons), score_form(1, 10, reasons), score_form(0, 100, reasons),
                      pair_form(reasons))]  # fmt: skip


def test_the_list_has_two_hundred_different_malformed_replies() -> None:
    assert len(set(MALFORMED)) == len(MALFORMED) >= 200


@pytest.mark.parametrize(("form", "reply"), MALFORMED)
def test_a_malformed_reply_is_no_verdict(form: ReplyForm, reply: str) -> None:
    verdict = parse(reply, form)
    assert verdict.label is None
    assert verdict.problem in PROBLEMS


@pytest.mark.parametrize(("form", "reply"), CUT)
def test_a_reply_that_was_cut_is_no_verdict(form: ReplyForm, reply: str) -> None:
    assert parse(reply, form).label is not None
    for reason in ("length", "error", "abort", None):
        assert parse(reply, form, reason).problem == "cut"


@pytest.mark.parametrize(("form", "reply", "label"), TRICKY)
def test_a_well_formed_reply_is_its_verdict_whatever_it_quotes(form: ReplyForm, reply: str, label: str) -> None:
    assert parse(reply, form).label == label


@pytest.mark.parametrize(
    ("reply", "problem"),
    [("", "empty"), ("7", "out_of_range"), ("-2", "out_of_range"), ("4 5", "several"), ("four", "no_verdict")],
)
def test_problems_are_called_by_their_names(reply: str, problem: str) -> None:
    assert parse(reply, score_form(1, 5)).problem == problem
    assert parse("A B", pair_form()).problem == "several"
    assert parse("Score: 1\nScore: 1", score_form(1, 5, reasons=True)).problem == "several"
    assert parse("Reason: x\nScore: 9", score_form(1, 5, reasons=True)).problem == "out_of_range"


@given(st.sampled_from(FORMS), st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_whatever_the_reply_a_verdict_is_a_label_that_stands_in_it(form: ReplyForm, reply: str) -> None:
    verdict = parse(reply, form)
    assert (verdict.label is None) != (verdict.problem is None)
    if verdict.label is not None:
        assert verdict.label in form.labels
        assert verdict.label in reply


@given(st.sampled_from(FORMS), st.text(alphabet='0123456789ABtie.:/-+ \n\rScoreVdt[]"', max_size=30))
def test_of_replies_made_of_verdicts_characters_only_the_well_formed_ones_are_read(form: ReplyForm, reply: str) -> None:
    labels = "|".join(form.labels)
    last_line = re.compile(f"(?:(?s:.*)\n)?{form.word}: ({labels})")
    text = reply.strip(" \t\r\n")
    found = last_line.fullmatch(text) if form.reasons else re.fullmatch(f"({labels})", text)
    well_formed = found is not None and (not form.reasons or text.lower().count(f"{form.word.lower()}:") == 1)
    assert parse(reply, form).label == found[1] if well_formed and found else parse(reply, form).label is None


@given(st.data(), st.sampled_from(FORMS), st.sampled_from(["", " ", "\n", "\r\n", "\t\n "]))
def test_a_well_formed_reply_is_read_exactly(data: st.DataObject, form: ReplyForm, space: str) -> None:
    label = data.draw(st.sampled_from(form.labels))
    reason = data.draw(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters=":\n\r"), min_size=1, max_size=80)
    )
    reply = f"Reason: {reason}\n{form.word}: {label}" if form.reasons else label
    assert parse(f"{space}{reply}{space}", form).label == label


@given(st.data(), st.sampled_from([form for form in FORMS if form.reasons]))
def test_two_verdicts_are_none_even_if_they_agree(data: st.DataObject, form: ReplyForm) -> None:
    first, second = data.draw(st.sampled_from(form.labels)), data.draw(st.sampled_from(form.labels))
    assert parse(f"{form.word}: {first}\n{form.word}: {second}", form).problem == "several"


@pytest.mark.parametrize("form", [form for form in FORMS if form.reasons], ids=str)
def test_the_longest_reason_of_any_script_is_not_cut(form: ReplyForm) -> None:
    """A vocabulary may have no more than bytes for a script; the longest character has four."""
    reply = f"Reason: {'𝔘' * MAX_REASON_CHARS}\n{form.word}: {max(form.labels, key=len)}"
    assert re.fullmatch(str(form.structured()["regex"]), reply)
    assert len(reply.encode()) < form.max_tokens


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_the_engine_is_told_to_allow_is_what_is_read(form: ReplyForm) -> None:
    allowed = form.structured()
    for label in form.labels:
        if form.reasons:
            reply = f"Reason: because\n{form.word}: {label}"
            assert re.fullmatch(str(allowed["regex"]), reply)
        else:
            reply = label
            assert reply in allowed["choice"]  # type: ignore[operator]
        assert parse(reply, form).label == label
        assert len(reply) < form.max_tokens
    if form.reasons:
        assert not re.fullmatch(str(allowed["regex"]), f"Reason: {form.word}: 1\n{form.word}: {form.labels[0]}")
