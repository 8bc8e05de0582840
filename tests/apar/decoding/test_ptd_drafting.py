from collections.abc import Sequence

import pytest
from arithmetic_model import (
    assert_well_formed,
    context,
    continue_with,
    decode,
    outcome_of,
    plain,
    repeating,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.errors import DecodingError
from apar.decoding.ptd import PtdDrafter, PtdDrafting, PtdOptions

PROMPT = [4, 1, 7, 2]


def starting(prompt: list[int], eos: tuple[int, ...] = (), **options: int) -> PtdDrafter:
    return PtdDrafting(PtdOptions(**options), eos).start(prompt, 0)


def observe(
    drafter: PtdDrafter, path: list[int], taken: list[int], next_token: int, predictions: dict[int, int]
) -> Draft:
    """Tell of a step whose predictions are by the node's token."""
    draft = drafter.propose()
    by_node = [predictions.get(token_id, 99) for token_id in draft.token_ids]
    drafter.observe(Outcome(draft, [*path, *taken], taken, [], next_token, by_node, None))
    return drafter.propose()


def candidates(draft: Draft) -> list[list[int]]:
    """Of every candidate the tokens from the path on."""
    return [context([], draft, node) for node in range(draft.num_candidates)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "ptd's width is 0: use a whole number, at least 1"),
        ({"depth": 0}, "ptd's depth is 0: use a whole number, at least 1"),
        ({"max_nodes": 7}, "ptd's max_nodes is 7: use a whole number, at least 8"),
        ({"pool_nodes": 0}, "ptd's pool_nodes is 0: use a whole number, at least 1"),
        ({"width": True}, "ptd's width is True: use a whole number, at least 1"),
        ({"depth": 2.0}, "ptd's depth is 2.0: use a whole number, at least 1"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_in_one_line(options: dict[str, int], message: str) -> None:
    with pytest.raises(DecodingError, match=f"^{message}$"):
        PtdOptions(**options)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_begins_with_two_chains_of_tokens_from_the_prompt(seed: int) -> None:
    draft = PtdDrafting(PtdOptions(), [2]).start([5, 6, 2, 7], seed).propose()
    assert draft.num_candidates == 0
    assert draft.parents[:2] == [NO_PARENT, 0]
    assert draft.parents[2:] in ([], [0], [1], [0, 1])
    assert draft.token_ids[0] != draft.token_ids[1]
    assert set(draft.token_ids) <= {5, 6, 7}


def test_seeds_are_random_and_repeatable() -> None:
    drafting = PtdDrafting(PtdOptions(), [])
    prompt = list(range(50))
    drafts = [drafting.start(prompt, seed).propose().token_ids for seed in range(30)]
    assert drafts == [drafting.start(prompt, seed).propose().token_ids for seed in range(30)]
    assert len({tuple(tokens) for tokens in drafts}) > 20


def test_a_prompt_without_usable_tokens_still_drafts_once_a_token_is_predicted() -> None:
    drafter = starting([2, 2], eos=(2,))
    assert len(drafter.propose()) == 0
    draft = observe(drafter, [2, 2], [8], 8, {})
    assert (draft.token_ids, draft.num_candidates) == ([8], 0)


def test_the_prediction_behind_the_path_is_kept_under_the_paths_last_token() -> None:
    drafter = starting([1, 2])
    observe(drafter, [1, 2], [3], 3, {})
    draft = observe(drafter, [1, 2, 3], [2], 2, {})
    assert candidates(draft) == [[3]]


def test_candidates_come_back_with_their_predictions_under_each_of_their_tokens() -> None:
    drafter = starting([1, 2])
    observe(drafter, [1, 2], [3], 3, {})  # 2: 3
    observe(drafter, [1, 2, 3], [2], 2, {})  # 3: 2
    observe(drafter, [1, 2, 3, 2], [5], 5, {3: 6})  # candidate 3, refused, predicts 6; the path goes on with 5
    draft = observe(drafter, [1, 2, 3, 2, 5], [2], 2, {})
    assert candidates(draft) == [[3], [5], [3, 6]]
    draft = observe(drafter, [1, 2, 3, 2, 5, 2], [3], 3, {})  # 99 behind everything
    assert candidates(draft) == [[2], [6], [99], [6, 99]]


def test_nothing_is_predicted_behind_a_candidate_eos() -> None:
    drafter = starting([1, 2], eos=(9,))
    observe(drafter, [1, 2], [9], 9, {})  # 2: 9
    observe(drafter, [1, 2, 9], [2], 2, {})
    draft = observe(drafter, [1, 2, 9, 2], [2], 9, {9: 5})
    assert [token_ids for token_ids in candidates(draft) if token_ids[0] == 9] == [[9]]


def test_the_drafting_tree_goes_to_the_pool_once_it_reaches_the_depth() -> None:
    drafter = starting([1], width=1, depth=3)
    drafter._tree.seed([[10]])
    path, pooled = [1], []
    for _ in range(3):
        predictions = {token_id: token_id + 1 for token_id in range(10, 20)}
        draft = observe(drafter, path, [50], 50, predictions)
        path.append(50)
        pooled.append([drafter._pool.candidates(token_id, 60)[0] for token_id in (10, 11, 12)])
    # 10-11 and 10-11-12 are still too low. With its prediction the latter has height 3: the pool gets it, and it steps.
    assert pooled == [[[], [], []], [[], [], []], [[11, 12, 13], [12, 13], [13]]]
    assert draft.token_ids[draft.num_candidates :] == [11, 12, 13]


def test_a_tree_that_its_node_cap_keeps_low_goes_to_the_pool_too() -> None:
    drafter = starting([1], width=1, max_nodes=8)  # 4 of them for the tree, which could be 5 high by its depth
    drafter._tree.seed([[10]])
    path = [1]
    for _ in range(5):
        observe(drafter, path, [50], 50, {token_id: token_id + 1 for token_id in range(10, 30)})
        path.append(50)
    assert drafter._pool.candidates(11, 60)[0] == [12, 13, 14, 15]


@given(
    width=st.integers(1, 4),
    depth=st.integers(1, 6),
    max_nodes=st.integers(8, 60),
    pool_nodes=st.integers(1, 30),
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_output_is_that_of_plain_decoding_and_drafts_keep_to_their_limits(
    width: int, depth: int, max_nodes: int, pool_nodes: int, seed: int, prompt: list[int]
) -> None:
    options = PtdOptions(width, depth, max_nodes, pool_nodes)
    run = decode(repeating, PtdDrafting(options, [10]), prompt, 60, seed)
    assert run.token_ids == plain(repeating, prompt, 60)
    for draft in run.drafts:
        assert_well_formed(draft)
        assert len(draft) <= max_nodes
        assert draft.num_candidates <= pool_nodes
        assert 10 not in draft.token_ids[draft.num_candidates :]


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_accepted_where_the_text_comes_round(seed: int) -> None:
    run = decode(repeating, PtdDrafting(PtdOptions(), []), PROMPT, 200, seed)
    assert run.token_ids == plain(repeating, PROMPT, 200)
    assert run.decoding_efficiency > 3


def test_the_drafting_tree_knows_what_the_path_has_never_shown() -> None:
    """The text counts, so it repeats nothing. The tree counts too, from the prompt's 40, and is there before it."""

    def counting(text: Sequence[int]) -> int:
        return text[-1] + 1

    run = decode(counting, PtdDrafting(PtdOptions(depth=3), []), [40, 30], 60)
    assert run.token_ids == list(range(31, 91))
    assert run.decoding_efficiency > 1


def test_a_child_drafts_its_own_tree_and_shares_the_pool_both_ways() -> None:
    drafter = starting([1, 2])
    observe(drafter, [1, 2], [3], 3, {})  # 2: 3
    child = drafter.fork([1, 2, 3, 7, 2])
    draft = child.propose()
    assert candidates(draft) == [[3]]
    assert set(draft.token_ids[1:]) <= {1, 2, 3, 7}
    observe(child, [1, 2, 3, 7, 2], [6], 6, {})
    assert candidates(observe(drafter, [1, 2, 3], [2], 2, {}))[:2] == [[3], [6]]


def test_children_of_one_thread_are_seeded_apart_and_repeatably() -> None:
    path = list(range(50))
    drafts = []
    for _ in range(2):
        drafter = starting(path)
        drafts.append([drafter.fork(path).propose().token_ids for _ in range(4)])
    assert drafts[0] == drafts[1]
    assert len({tuple(tokens) for tokens in drafts[0]}) > 1


def test_a_childs_answer_is_plain_decoding_too() -> None:
    drafter = PtdDrafting(PtdOptions(), []).start(PROMPT, 0)
    path = list(PROMPT)
    for _ in range(20):
        outcome = outcome_of(repeating, path, drafter.propose())
        path = list(outcome.path)
        drafter.observe(outcome)
    child_path = [*path, 3, 8]
    run = continue_with(repeating, drafter.fork(child_path), child_path, 80)
    assert run.token_ids == plain(repeating, child_path, 80)
    assert run.drafts[0].num_candidates or run.drafts[1].num_candidates


def test_answers_do_not_know_each_other() -> None:
    drafting = PtdDrafting(PtdOptions(), [])
    first = decode(repeating, drafting, PROMPT, 100)
    again = decode(repeating, drafting, PROMPT, 100)
    assert first.drafts == again.drafts
