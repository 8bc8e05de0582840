"""What a step accepts: greedily the argmax's path, with sampling exactly the model's distribution."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from apar.decoding import verification
from apar.decoding.drafting import NO_PARENT, Draft
from apar.decoding.sampling import Distribution, SamplingOptions
from apar.decoding.verification import SamplingVerifier, Verdict, verify_greedily

VOCAB_SIZE = 5
NUM_DRAWS = 2_500
SURE, IMPOSSIBLE = 1e-3, 1e-9
"""p-values: a right rule stays above the first (the seed is fixed), a broken one falls below the second."""


def logits_for(bests: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(bests), VOCAB_SIZE).float()


def greedy(draft: Draft, bests: list[int]) -> Verdict:
    return verify_greedily(draft, logits_for(bests), bests)


def test_without_a_draft_the_models_token_is_all() -> None:
    assert greedy(Draft(), [3]) == Verdict([], 3)


def test_the_argmax_is_followed_while_it_is_a_candidate() -> None:
    draft = Draft([1, 2, 3, 4], [NO_PARENT, NO_PARENT, 1, 2], 4)
    assert greedy(draft, [2, 0, 3, 4, 0]) == Verdict([1, 2, 3], 0)
    assert greedy(draft, [2, 0, 4, 0, 0]) == Verdict([1], 4)
    assert greedy(draft, [0, 0, 0, 0, 0]) == Verdict([], 0)


def test_only_candidates_are_accepted() -> None:
    assert greedy(Draft([1, 2], [NO_PARENT, 0], 1), [1, 2, 0]) == Verdict([0], 2)


def test_chains_that_begin_alike_are_one_place_in_the_text() -> None:
    draft = Draft([1, 2, 1, 3], [NO_PARENT, 0, NO_PARENT, 2], 4)
    assert greedy(draft, [1, 3, 0, 3, 4]) == Verdict([0, 3], 4)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

TREES = {
    "no draft": Draft(),
    "chain": Draft([1, 2], [NO_PARENT, 0], 2),
    "siblings": Draft([0, 1, 2], [NO_PARENT] * 3, 3),
    "every token": Draft([4, 3, 2, 1, 0], [NO_PARENT] * 5, 5),
    "two levels": Draft([0, 1, 2, 3, 4, 0], [NO_PARENT, NO_PARENT, 0, 0, 1, 1], 6),
    "chains that begin alike": Draft([1, 2, 1, 3, 1, 3], [NO_PARENT, 0, NO_PARENT, 2, NO_PARENT, 4], 6),
}
OPTIONS = {
    "temperature 1": SamplingOptions(1.0),
    "temperature 0.6": SamplingOptions(0.6),
    "top-p 0.8": SamplingOptions(1.3, top_p=0.8),
    "top-k 2": SamplingOptions(1.0, top_k=2),
    "min-p 0.3": SamplingOptions(0.9, min_p=0.3),
}


class Language:
    """Logits that depend on the two tokens before."""

    def __init__(self, seed: int) -> None:
        self._logits = torch.randn(
            VOCAB_SIZE + 1, VOCAB_SIZE + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)
        )

    def __call__(self, text: list[int]) -> torch.Tensor:
        last, before = [VOCAB_SIZE, VOCAB_SIZE, *text][:-3:-1]
        return self._logits[before, last]

    def behind(self, draft: Draft, path: list[int]) -> torch.Tensor:
        texts = [path]
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            texts.append([*texts[1 + parent], token])
        return torch.stack([self(text) for text in texts])

    def exact(self, options: SamplingOptions, length: int) -> dict[tuple[int, ...], float]:
        """The probability of every text of this length."""
        distribution, chances = Distribution(options), {(): 1.0}
        for _ in range(length):
            chances = {
                (*text, token): chance * float(probability)
                for text, chance in chances.items()
                for token, probability in enumerate(distribution(self(list(text))[None])[0])
            }
        return chances


def p_value(language: Language, draft: Draft, options: SamplingOptions) -> float:
    """Of texts of three tokens, the first of them drafted, against the model's own distribution."""
    verify = SamplingVerifier(options, torch.Generator().manual_seed(11))
    rows = language.behind(draft, [])
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_DRAWS):
        verdict = verify(draft, rows, [])
        text = [*(draft.token_ids[node] for node in verdict.accepted), verdict.token]
        while len(text) < 3:
            text.append(verify(Draft(), language(text)[None], []).token)
        counts[tuple(text[:3])] += 1
    exact = language.exact(options, 3)
    assert all(exact[text] > 0 for text in counts), "a text that the filters leave out"
    expected, observed, rare = [], [], [0.0, 0.0]
    for text in product(range(VOCAB_SIZE), repeat=3):
        if exact[text] * NUM_DRAWS >= 5:
            expected.append(exact[text] * NUM_DRAWS)
            observed.append(float(counts[text]))
        else:  # the test wants five of a kind
            rare = [rare[0] + exact[text] * NUM_DRAWS, rare[1] + counts[text]]
    if rare[0] > 0:
        expected.append(rare[0])
        observed.append(rare[1])
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("draft", TREES.values(), ids=TREES.keys())
def test_drafts_leave_the_distribution_as_it_is(draft: Draft, options: SamplingOptions) -> None:
    assert p_value(Language(5), draft, options) > SURE


def _reused_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for all children of a node, as the paper's text can be read."""
    uniform = SamplingVerifier._uniform
    numbers: list[float] = []

    def reused(self: SamplingVerifier) -> float:
        if not numbers:
            numbers.append(uniform(self))
        return numbers[0]

    whole = SamplingVerifier.__call__

    def call(self: SamplingVerifier, *args: Any) -> Verdict:
        numbers.clear()
        return whole(self, *args)

    monkeypatch.setattr(SamplingVerifier, "_uniform", reused)
    monkeypatch.setattr(SamplingVerifier, "__call__", call)


def _not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    def residual(probabilities_v: torch.Tensor, token: int) -> torch.Tensor:
        left_v = probabilities_v.clone()
        left_v[token] = 0.0
        return left_v

    monkeypatch.setattr(verification, "residual", residual)


def _refused_token_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "residual", lambda probabilities_v, token: probabilities_v)


def _argmax_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", lambda probabilities_v, _, generator: probabilities_v.argmax())


@pytest.mark.parametrize("broken", [_reused_number, _not_renormalised, _refused_token_stays, _argmax_at_the_end])
def test_a_broken_rule_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert p_value(Language(3), TREES["siblings"], OPTIONS["temperature 1"]) < IMPOSSIBLE


def test_candidates_with_no_chance_are_never_taken() -> None:
    logits_nv = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, -torch.inf]])
    verify = SamplingVerifier(SamplingOptions(1.0), torch.Generator().manual_seed(0))
    for _ in range(200):
        verdict = verify(Draft([2], [NO_PARENT], 1), logits_nv, [])
        assert (verdict.accepted, verdict.token in (0, 1)) == ([], True)
