"""Which answers of a small model are learnt from."""

from hypothesis import given
from hypothesis import strategies as st

from worker.bootstrap.selecting import Selected, count_words, select

PROSE = "The kettle boils while a neighbour mends the old green fence behind her quiet house."


def judge(text: str | None, finish_reason: str | None = "stop", min_words: int = 10) -> Selected:
    return select(text, finish_reason, max_repetition=0.3, min_words=min_words)


def test_an_answer_that_ended_by_itself_is_kept_without_trailing_space() -> None:
    assert judge(PROSE + " \n") == Selected(PROSE, complete=True)


def test_a_row_that_failed_and_an_empty_answer_teach_nothing() -> None:
    assert judge(None, None).reason == "failed"
    assert judge(" \n ").reason == "empty"


def test_an_answer_is_kept_up_to_where_it_begins_to_loop() -> None:
    points = "1. Use a strong password.\n2. Lock the garden door at night.\n3. Ask a friend to look in now and then."
    loop = "\n4. Use a strong password.\n5. Use a strong password.\n6. Use a strong password."
    assert judge(points + loop) == Selected(points + "\n", complete=False)


def test_a_paragraph_that_begins_to_loop_ends_there() -> None:
    loop = " I like the old sea." + " I like the old sea, and the sea likes me." * 5
    assert judge(f"{PROSE}\n\n{PROSE[:20]} rests.{loop}") == Selected(
        f"{PROSE}\n\n{PROSE[:20]} rests. I like the old sea.\n\n", complete=False
    )
    assert judge(f"{PROSE}\nA short line.{loop}") == Selected(
        f"{PROSE}\nA short line. I like the old sea.\n", complete=False
    )


def test_a_loop_within_the_first_line_leaves_nothing_to_learn_from() -> None:
    assert (
        judge("I like the sea, I like the sea, I like the sea, I like the sea, I like the sea.").reason == "repetitive"
    )


def test_a_loop_that_begins_too_early_is_dropped_whole() -> None:
    assert judge("One two three four five.\n" * 5, min_words=20).reason == "repetitive"


def test_an_answer_that_was_cut_off_loses_its_last_line() -> None:
    cut = f"{PROSE}\n\nOn the other hand, the weath"
    assert judge(cut, "length") == Selected(PROSE + "\n\n", complete=False)


def test_an_answer_that_was_cut_off_within_its_only_line_is_dropped() -> None:
    assert judge(PROSE[:-9], "length").reason == "cut"


def test_a_short_rest_of_a_cut_answer_is_dropped() -> None:
    assert judge("A start.\n\n" + PROSE, "length").reason == "cut"


def test_an_answer_that_was_cut_off_behind_a_line_break_keeps_all_lines() -> None:
    assert judge(PROSE + "\n", "length") == Selected(None, reason="cut")  # the last line may be unfinished


@given(st.text(max_size=300), st.sampled_from(["stop", "length"]))
def test_what_is_kept_begins_the_answer_and_says_whether_it_is_all_of_it(text: str, finish_reason: str) -> None:
    selected = judge(text, finish_reason, min_words=3)
    if selected.text is None:
        assert selected.reason in ("empty", "repetitive", "cut")
        return
    assert selected.reason is None
    assert text.startswith(selected.text.removesuffix("\n").removesuffix("\n"))
    assert selected.complete == (finish_reason == "stop" and selected.text == text.rstrip())
    assert selected.complete or count_words(selected.text) >= 3
