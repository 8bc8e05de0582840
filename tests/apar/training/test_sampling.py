"""Draws: shares, no answer again before its turn, and any step on its own."""

from hypothesis import given
from hypothesis import strategies as st

from apar.training.sampling import Sampler

sizes = st.integers(1, 40)


@given(sizes, sizes, st.integers(1, 17), st.floats(0, 1), st.integers(0, 5))
def test_every_batch_is_full_and_the_share_holds(first: int, second: int, batch: int, share: float, seed: int) -> None:
    sampler = Sampler(first, second, batch, share, seed)
    drawn = [sampler.batch(step) for step in range(20)]
    assert all(len(a) + len(b) == batch for a, b in drawn)
    for steps in range(1, 21):
        assert abs(sum(len(a) for a, _ in drawn[:steps]) - share * batch * steps) <= 1


@given(sizes, sizes, st.integers(1, 17), st.integers(0, 5))
def test_no_answer_comes_again_before_all_of_its_sort_have_come(first: int, second: int, batch: int, seed: int) -> None:
    sampler = Sampler(first, second, batch, 0.5, seed)
    for sort, size in enumerate((first, second)):
        drawn = [index for step in range(30) for index in sampler.batch(step)[sort]]
        for start in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[start : start + size]) == list(range(size))


def test_a_step_depends_on_nothing_but_seed_and_number() -> None:
    one, other = Sampler(30, 20, 8, 0.5, 3), Sampler(30, 20, 8, 0.5, 3)
    assert [one.batch(step) for step in range(20)][13:] == [other.batch(step) for step in range(13, 20)]
    assert [Sampler(30, 20, 8, 0.5, 4).batch(step) for step in range(5)] != [one.batch(step) for step in range(5)]


def test_an_epoch_draws_every_answer_of_the_larger_sort() -> None:
    sampler = Sampler(10, 33, 8, 0.5, 0)
    assert sampler.steps(1) == 9
    assert {index for step in range(9) for index in sampler.batch(step)[1]} == set(range(33))
    assert Sampler(10, 0, 8, 1.0, 0).steps(2) == 3
