from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar.decoding.draft_pool import DraftPool, Trie, count_nodes, cut, level_order, merge
from apar.decoding.drafting import NO_PARENT

TOKENS = st.integers(0, 4)
TRIES: st.SearchStrategy[Trie] = st.recursive(
    st.builds(dict), lambda children: st.dictionaries(TOKENS, children, max_size=4), max_leaves=30
)


def paths(trie: Trie) -> set[tuple[int, ...]]:
    """From the root to each node."""
    found = set()
    for token_id, children in trie.items():
        found |= {(token_id,), *((token_id, *path) for path in paths(children))}
    return found


def pooled_paths(pool: DraftPool, key: int, max_nodes: int = 1000) -> list[tuple[int, ...]]:
    token_ids, parents = pool.candidates(key, max_nodes)
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        found.append((*(found[parent] if parent != NO_PARENT else ()), token_id))
    return found


def test_merging_copies_what_is_missing_and_goes_down_where_the_token_is_there() -> None:
    mine: Trie = {1: {2: {}}, 3: {}}
    assert merge(mine, {1: {4: {5: {}}}, 6: {7: {}}}) == 4
    assert mine == {1: {2: {}, 4: {5: {}}}, 3: {}, 6: {7: {}}}


@given(TRIES, TRIES)
def test_merging_gives_the_union_of_the_paths(mine: Trie, other: Trie) -> None:
    before, given_trie = paths(mine), deepcopy(other)
    gained = merge(mine, other)
    assert paths(mine) == before | paths(given_trie)
    assert gained == len(paths(mine)) - len(before)
    assert other == given_trie


def test_what_was_merged_in_may_be_changed_afterwards() -> None:
    pool = DraftPool()
    trie: Trie = {1: {2: {}}}
    pool.merge(0, trie)
    trie[1][3] = {}
    assert pooled_paths(pool, 0) == [(1,), (1, 2)]


def test_a_key_gives_its_trie_level_by_level() -> None:
    pool = DraftPool()
    pool.merge(0, {1: {2: {3: {}}, 4: {}}, 5: {6: {}}})
    assert pool.candidates(0, 60) == ([1, 5, 2, 4, 6, 3], [NO_PARENT, NO_PARENT, 0, 0, 1, 2])


def test_a_budget_cuts_the_lowest_levels() -> None:
    pool = DraftPool()
    pool.merge(0, {1: {2: {3: {}}, 4: {}}, 5: {6: {}}})
    assert pool.candidates(0, 3) == ([1, 5, 2], [NO_PARENT, NO_PARENT, 0])
    assert pool.candidates(0, 0) == ([], [])


def test_an_unknown_key_has_no_candidates() -> None:
    pool = DraftPool()
    pool.merge(0, {1: {}})
    pool.merge(2, {})
    assert pool.candidates(1, 60) == pool.candidates(2, 60) == ([], [])


def test_the_oldest_first_level_child_goes_with_all_behind_it_when_a_key_is_full() -> None:
    pool = DraftPool(nodes_per_key=4)
    pool.merge(0, {1: {2: {}}, 3: {}})
    pool.merge(0, {3: {4: {}}, 5: {}})
    assert pooled_paths(pool, 0) == [(3,), (5,), (3, 4)]
    assert pool.num_nodes(0) == 3


def test_a_first_level_child_that_is_too_large_by_itself_loses_its_lowest_levels() -> None:
    pool = DraftPool(nodes_per_key=3)
    pool.merge(0, {1: {2: {4: {}, 5: {}}, 3: {6: {}}}})
    assert pooled_paths(pool, 0) == [(1,), (1, 2), (1, 3)]


@given(TRIES, st.integers(0, 20))
def test_cutting_keeps_the_first_nodes_in_level_order(trie: Trie, max_nodes: int) -> None:
    expected = [token_id for _, token_id, _ in level_order(trie)][:max_nodes]
    cut(trie, max_nodes)
    assert [token_id for _, token_id, _ in level_order(trie)] == expected


@given(st.lists(st.tuples(TOKENS, TRIES), max_size=30), st.integers(1, 12))
def test_no_key_ever_holds_more_than_its_nodes(merges: list[tuple[int, Trie]], nodes_per_key: int) -> None:
    pool = DraftPool(nodes_per_key)
    for key, trie in merges:
        pool.merge(key, trie)
        held = pooled_paths(pool, key)
        assert len(held) == pool.num_nodes(key) <= nodes_per_key
        assert len(held) == len(set(held))
        assert bool(held) >= bool(trie)


@given(TRIES, st.integers(0, 30))
def test_a_cut_candidate_tree_keeps_every_parent(trie: Trie, max_nodes: int) -> None:
    pool = DraftPool(1000)
    pool.merge(0, trie)
    held = pooled_paths(pool, 0, max_nodes)
    assert len(held) == min(max_nodes, count_nodes(trie))
    assert set(held) <= paths(trie)


@pytest.mark.parametrize("length", [5_000])
def test_long_chains_need_no_recursion(length: int) -> None:
    trie: Trie = {}
    for token_id in range(length):
        trie = {token_id: trie}
    pool = DraftPool(length)
    pool.merge(0, trie)
    assert pool.num_nodes(0) == length
