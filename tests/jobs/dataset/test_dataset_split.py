"""The split: by what was asked first, and by nothing else."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jobs.dataset.split import is_test

contents = st.text(max_size=20)
shares = st.floats(0.01, 0.99)
later = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["assistant", "user"]), "content": contents}), max_size=4
)


@hypothesis_settings(deadline=None)
@given(contents, later, later, contents, shares)
def test_answers_later_turns_and_the_system_prompt_do_not_move_a_conversation(
    asked: str, one: list[dict[str, str]], other: list[dict[str, str]], system: str, share: float
) -> None:
    first = {"role": "user", "content": asked}
    assert is_test([first, *one], share) == is_test([{"role": "system", "content": system}, first, *other], share)


@hypothesis_settings(deadline=None)
@given(contents, shares, shares)
def test_a_larger_share_keeps_what_a_smaller_one_had(asked: str, one: float, other: float) -> None:
    messages = [{"role": "user", "content": asked}]
    if is_test(messages, min(one, other)):
        assert is_test(messages, max(one, other))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_share_is_met(share: float) -> None:
    number = sum(is_test([{"role": "user", "content": f"question {n}"}], share) for n in range(4000))
    assert abs(number / 4000 - share) < 0.03


def test_the_side_is_the_same_in_every_version() -> None:
    sides = [is_test([{"role": "user", "content": f"question {n}"}], 0.5) for n in range(16)]
    assert "".join("ft"[side] for side in sides) == "ttffftftfttfftft"
    assert is_test([{"role": "assistant", "content": "no question"}], 0.99)
