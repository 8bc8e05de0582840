"""Slots of the KV pool: never in two hands, free when the last holder lets go, and never moved."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from apar.decoding.cache import FIRST_SLOTS, SlotCache, SlotPool

Moves = st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)), max_size=60)


@given(Moves)
def test_a_slot_is_free_exactly_when_nobody_holds_it(moves: list[tuple[str, int]]) -> None:
    pool = SlotPool()
    hands: list[list[int]] = []
    for move, number in moves:
        if move == "take":
            hands.append(pool.take(number))
        elif hands:
            hand = hands[number % len(hands)]
            if move == "share":
                pool.share(hand)
                hands.append(list(hand))
            else:
                hands.remove(hand)
                pool.release(hand)
        held = {slot for hand in hands for slot in hand}
        assert pool.num_used == len(held)
        assert pool.num_spanned == max(held, default=-1) + 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_what_is_taken_was_free_and_is_the_lowest(sizes: list[int]) -> None:
    pool, held = SlotPool(), set[int]()
    for size in sizes:
        taken = pool.take(size)
        assert not held & set(taken)
        held |= set(taken)
        if len(held) > 3:
            pool.release([min(held)])
            lowest = min(held)
            held.remove(lowest)
            assert pool.take(1) == [lowest]
            held.add(lowest)


def test_a_pool_that_grows_keeps_what_it_holds() -> None:
    cache = SlotCache(1)
    slots = cache.pool.take(3)
    cache.write_to(torch.tensor(slots))
    keys = torch.arange(6.0).reshape(1, 1, 3, 2)
    cache.update(keys, keys + 10, 0)
    more = cache.pool.take(2 * FIRST_SLOTS)
    cache.write_to(torch.tensor(more[-1:]))
    seen_keys, seen_values = cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    assert seen_keys.shape == (1, 1, cache.pool.num_spanned, 2)
    assert torch.equal(seen_keys[:, :, slots], keys)
    assert torch.equal(seen_values[:, :, slots], keys + 10)
    assert torch.equal(seen_keys[0, 0, more[-1]], torch.ones(2))
