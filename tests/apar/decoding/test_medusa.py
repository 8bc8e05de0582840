"""Drafting with Medusa heads: the candidate tree by hand, and answers that drafts make sooner, not other."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_heads import fitted_heads
from hypothesis import given
from hypothesis import strategies as st
from serving import Reference
from tiny_models import CHILD, EOS, FLOAT32_ERROR, FORK, MAX_MODEL_LEN, GapRecorder, make_tiny_model, random_prompts

from apar.decoding import DecodingError, TreeModel, make_decoder
from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.medusa import MedusaDrafting, MedusaOptions, candidate_tree
from apar.decoding.medusa_heads import MedusaHeads
from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder

PROMPTS = random_prompts(12, seed=1)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("medusa")


@pytest.fixture(scope="module")
def model(room: Path) -> TreeModel:
    return TreeModel(Reference(make_tiny_model(room / "tiny")).model)


@pytest.fixture(scope="module")
def heads(room: Path, model: TreeModel) -> Path:
    return fitted_heads(room / "heads", model.hf, PROMPTS)


# --- the candidate tree ---


def test_the_tree_holds_the_likeliest_paths_of_the_product() -> None:
    tree = candidate_tree([[7, 8, 9], [1, 2]], [[0.6, 0.3, 0.05], [0.7, 0.2]], max_nodes=5)
    # 7: 0.6; 7 1: 0.42; 8: 0.3; 8 1: 0.21; 7 2: 0.12. Left out: 8 2 (0.06), 9 (0.05) and what is behind it.
    assert tree == Draft([7, 1, 8, 1, 2], [NO_PARENT, 0, NO_PARENT, 2, 0], num_candidates=5)


def test_a_small_product_is_taken_whole() -> None:
    tree = candidate_tree([[7], [1, 2], [5]], [[0.5], [0.5, 0.4], [0.5]], max_nodes=99)
    assert sorted(zip(tree.token_ids, tree.parents, strict=True)) == sorted(
        [(7, NO_PARENT), (1, 0), (2, 0), (5, tree.token_ids.index(1)), (5, tree.token_ids.index(2))]
    )


probabilities = st.lists(st.floats(0.001, 1), min_size=1, max_size=4).map(lambda found: sorted(found, reverse=True))


@given(st.lists(probabilities, min_size=1, max_size=3), st.integers(1, 20))
def test_no_path_that_was_left_out_is_likelier_than_one_in_the_tree(guesses: list[list[float]], max_nodes: int) -> None:
    tokens = [[10 * head + i for i in range(len(found))] for head, found in enumerate(guesses)]
    tree = candidate_tree(tokens, guesses, max_nodes)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        assert parent < len(paths)  # parents first
        paths.append((*(() if parent == NO_PARENT else paths[parent]), token))
    product = [path for depth in range(1, len(tokens) + 1) for path in itertools.product(*tokens[:depth])]

    def likelihood(path: tuple[int, ...]) -> float:
        return math.prod(guesses[head][token - 10 * head] for head, token in enumerate(path))

    assert len(set(paths)) == len(paths) == min(max_nodes, len(product))
    assert set(paths) <= set(product)
    least = min(map(likelihood, paths))
    assert all(likelihood(path) <= least * (1 + 1e-9) for path in set(product) - set(paths))


@pytest.mark.parametrize("options", [{"top_k": 0}, {"max_nodes": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DecodingError, match=r"is 0: use a whole number, at least 1"):
        MedusaOptions(**options)


# --- drafting ---


def outcome(hidden_h: torch.Tensor) -> Outcome:
    return Outcome(Draft(), [1, 2, 3], [3], [], 3, [], hidden_h)


def test_heads_read_the_newest_hidden_state_and_draft_what_follows_the_newest_token() -> None:
    heads = MedusaHeads(2, 0, 4, 4)  # without layers, and with these weights, a state's largest entry is the guess
    with torch.no_grad():
        heads[0][-1].weight.copy_(torch.eye(4))
        heads[1][-1].weight.copy_(torch.eye(4).roll(1, 0))  # the second head: one token on
    drafter = MedusaDrafting(heads, MedusaOptions(top_k=1)).start([1, 2], seed=0)
    assert drafter.needs_hidden
    assert drafter.propose() == Draft()
    drafter.observe(outcome(torch.tensor([0.0, 9.0, 0.0, 0.0])))
    assert drafter.propose() == Draft([1, 2], [NO_PARENT, 0], num_candidates=2)
    drafter.observe(outcome(torch.tensor([0.0, 0.0, 9.0, 0.0])))
    child = drafter.fork([1, 2, 3, FORK, CHILD])
    assert child.propose() == Draft()
    assert drafter.propose() == Draft([2, 3], [NO_PARENT, 0], num_candidates=2)


def test_threads_of_an_answer_are_computed_together_and_each_gets_its_own_draft() -> None:
    heads = MedusaHeads(1, 0, 4, 4)
    with torch.no_grad():
        heads[0][-1].weight.copy_(torch.eye(4))
    sizes: list[int] = []
    heads.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    drafting = MedusaDrafting(heads, MedusaOptions(top_k=1))
    root = drafting.start([1, 2], seed=0)
    threads = [root, root.fork([1, FORK, CHILD]), root.fork([1, 2, FORK, CHILD])]
    other = drafting.start([1, 2], seed=0)  # another answer, which was given up
    other.observe(outcome(torch.eye(4)[0]))
    for token, thread in enumerate(threads):
        thread.observe(outcome(torch.eye(4)[token]))
    assert [thread.propose().token_ids for thread in reversed(threads)] == [[2], [1], [0]]
    assert sizes == [3]


# --- decoding ---


def expected(model: TreeModel, prompt: list[int], *, fork: bool) -> tuple[list[int], float]:
    recorder = GapRecorder()
    decoder = ReferenceDecoder(model.hf, ControlTokens(FORK, CHILD), ForkLimits(), [EOS], MAX_MODEL_LEN, recorder)
    return decoder.decode(prompt, max_tokens=60, fork=fork).token_ids, recorder.smallest_gap


@pytest.mark.parametrize("name", ["medusa", "apar+medusa"])
@pytest.mark.parametrize("max_nodes", [1, 16])
def test_drafts_change_no_answer_and_save_forwards(model: TreeModel, heads: Path, name: str, max_nodes: int) -> None:
    decoders = {
        which: make_decoder(
            which, model, control=ControlTokens(FORK, CHILD), eos_token_ids=[EOS], medusa=heads,
            medusa_tree=MedusaOptions(max_nodes=max_nodes),
        )
        for which in (name, "apar" if "apar" in name else "ar")
    }  # fmt: skip
    forwards = dict.fromkeys(decoders, 0)
    num_compared = num_forks = 0
    for prompt in PROMPTS:
        token_ids, gap = expected(model, prompt, fork="apar" in name)
        if gap < FLOAT32_ERROR:
            continue
        num_compared += 1
        for which, decoder in decoders.items():
            result = decoder.decode(prompt, max_tokens=60)
            assert result.token_ids == token_ids
            forwards[which] += result.drafting.forwards
            num_forks += result.num_forks
            if which == name:
                # Every step but each thread's first has a tree.
                assert result.drafting.hits >= result.drafting.thread_steps - len(result.threads)
                assert result.drafting.verify_nodes <= max_nodes * result.drafting.hits
    assert num_compared > 8
    assert (num_forks > 0) == ("apar" in name)
    drafting, plain = forwards.values()
    assert drafting < 0.9 * plain


def test_heads_are_needed_and_have_to_be_the_models(model: TreeModel, tmp_path: Path) -> None:
    with pytest.raises(DecodingError, match="needs trained heads"):
        make_decoder("medusa", model, control=None, eos_token_ids=[EOS])
    with pytest.raises(DecodingError, match="holds no Medusa heads"):
        make_decoder("medusa", model, control=None, eos_token_ids=[EOS], medusa=tmp_path)
