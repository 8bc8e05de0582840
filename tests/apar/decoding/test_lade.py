import pytest
from arithmetic_model import assert_well_formed, context, decode, plain, repeating
from hypothesis import given, settings
from hypothesis import strategies as st

from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.errors import DecodingError
from apar.decoding.lade import LadeDrafter, LadeDrafting, LadeOptions, NgramPool

PROMPT = [4, 1, 7, 2]


def step(drafter: LadeDrafter, path: list[int], first_prediction: int) -> Draft:
    """Predictions are `first_prediction` and on, by node; the path goes on with 90."""
    draft = drafter.propose()
    predictions = [first_prediction + node for node in range(len(draft))]
    path.append(90)
    drafter.observe(Outcome(draft, path, [90], [], 90, predictions, None))
    return draft


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "lade's window is 0: use a whole number, at least 1"),
        ({"ngram": 2}, "lade's ngram is 2: use a whole number, at least 3"),
        ({"guesses": 0}, "lade's guesses is 0: use a whole number, at least 1"),
        ({"guesses": False}, "lade's guesses is False: use a whole number, at least 1"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_in_one_line(options: dict[str, int], message: str) -> None:
    with pytest.raises(DecodingError, match=f"^{message}$"):
        LadeOptions(**options)


def test_a_token_keeps_its_latest_ngrams() -> None:
    pool = NgramPool(guesses=2)
    pool.add(1, (2, 3))
    pool.add(1, (4, 5))
    pool.add(1, (2, 3))
    pool.add(1, (6, 7))
    assert pool[1] == [(6, 7), (2, 3)]
    assert pool[2] == []


def test_the_window_fills_level_by_level_and_then_moves_a_token_a_step() -> None:
    """W = 3, N = 4: level 0 has columns 1 and 2 beside the path's last token, levels 1 and 2 have three."""
    drafter = LadeDrafting(LadeOptions(window=3, ngram=4, guesses=7), []).start(PROMPT, 0)
    path = list(PROMPT)
    first = step(drafter, path, 10)
    assert first.parents == [NO_PARENT, 0, 1, 2]
    assert set(first.token_ids) <= set(PROMPT)
    _, b, c, d = first.token_ids
    second = step(drafter, path, 20)
    # 10 to 13 stood behind level 0. Column 0 of level 1 hangs from the path's last token: it has come to where a was.
    assert second.token_ids == [b, c, d, 10, 11, 12, 13]
    assert second.parents == [NO_PARENT, 0, 1, NO_PARENT, 0, 1, 2]
    third = step(drafter, path, 30)
    # 23 to 26 stood behind level 1.
    assert third.token_ids == [c, d, 11, 12, 13, 24, 25, 26]
    assert third.parents == [NO_PARENT, 0, NO_PARENT, 0, 1, 2, 3, 4]
    fourth = drafter.propose()
    # 35 to 37 stood behind level 2. Each level takes the place of the one before.
    assert fourth.token_ids[fourth.num_candidates :] == [12, 13, 24, 25, 26, 35, 36, 37]
    # The n-grams by columns: the path's last token 90 with 11, 24 and 35; c with 12, 25 and 36; d with 13, 26 and 37.
    assert drafter._pool[90] == [(11, 24, 35)]
    assert (12, 25, 36) in drafter._pool[c]
    assert (13, 26, 37) in drafter._pool[d]


def test_candidates_are_chains_of_their_own() -> None:
    pool_drafter = LadeDrafting(LadeOptions(window=2, ngram=3, guesses=3), []).start(PROMPT, 0)
    for rest in ((5, 6), (5, 7)):
        pool_drafter._pool.add(PROMPT[-1], rest)
    draft = pool_drafter.propose()
    assert draft.num_candidates == 4
    assert draft.token_ids[:4] == [5, 7, 5, 6]
    assert draft.parents[:4] == [NO_PARENT, 0, NO_PARENT, 2]
    assert draft.parents[4:] == [NO_PARENT, 4]


def test_the_defaults_cost_what_the_readme_of_lookahead_decoding_says() -> None:
    run = decode(repeating, LadeDrafting(LadeOptions(), []), PROMPT, 60)
    # 7 columns and 4 levels without column 0 of level 0, which is the path's last token; 7 candidates of 4 tokens.
    assert [len(draft) - draft.num_candidates for draft in run.drafts[:5]] == [9, 17, 23, 27, 27]
    assert max(draft.num_candidates for draft in run.drafts) <= 28


def test_eos_does_not_get_into_the_window() -> None:
    drafter = LadeDrafting(LadeOptions(window=2, ngram=3), [10, 11]).start([5, 10], 0)
    draft = drafter.propose()
    assert draft.token_ids == [5, 5]
    drafter.observe(Outcome(draft, [5, 10, 6], [6], [], 6, [10, 11], None))
    assert set(drafter.propose().token_ids) == {5}


@given(
    window=st.integers(1, 6),
    ngram=st.integers(3, 6),
    guesses=st.integers(1, 5),
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_output_is_that_of_plain_decoding_and_drafts_keep_to_their_limits(
    window: int, ngram: int, guesses: int, seed: int, prompt: list[int]
) -> None:
    run = decode(repeating, LadeDrafting(LadeOptions(window, ngram, guesses), [10]), prompt, 60, seed)
    assert run.token_ids == plain(repeating, prompt, 60)
    for draft in run.drafts:
        assert_well_formed(draft)
        assert draft.num_candidates <= guesses * (ngram - 1)
    assert len(run.drafts[-1]) - run.drafts[-1].num_candidates <= window * (ngram - 1) + ngram


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_accepted_where_the_text_comes_round(seed: int) -> None:
    run = decode(repeating, LadeDrafting(LadeOptions(), []), PROMPT, 200, seed)
    assert run.token_ids == plain(repeating, PROMPT, 200)
    assert run.decoding_efficiency > 2


def test_every_ngram_is_what_the_model_said_behind_its_column() -> None:
    """A column's tokens were each predicted behind those before, though with older tokens further up."""
    drafter = LadeDrafting(LadeOptions(window=3, ngram=3), []).start(PROMPT, 0)
    draft = drafter.propose()
    predictions = [repeating(context(PROMPT, draft, node)) for node in range(len(draft))]
    drafter.observe(Outcome(draft, [*PROMPT, 6], [6], [], 6, predictions, None))
    window = drafter.propose()
    assert window.token_ids == [*draft.token_ids[1:], *predictions]


def test_a_child_has_a_window_of_its_own_and_shares_the_ngrams() -> None:
    drafter = LadeDrafting(LadeOptions(window=2, ngram=3), []).start(PROMPT, 0)
    drafter._pool.add(8, (5, 6))
    draft = drafter.fork([*PROMPT, 9, 8]).propose()
    assert draft.token_ids[:2] == [5, 6]
    assert draft.num_candidates == 2
    assert set(draft.token_ids[2:]) <= {*PROMPT, 9, 8}
