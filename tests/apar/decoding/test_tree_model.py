"""A tree computed at once gives the logits of its paths computed one by one; models that cannot do that are refused."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from decoding_support import plain_logits, random_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FLOAT32_ERROR, VOCAB_SIZE, make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from apar.decoding import DecodingError, TreeModel, load_model
from apar.decoding.drafting import NO_PARENT, Draft
from apar.decoding.model import Work


def path_to(draft: Draft, node: int) -> list[int]:
    tokens: list[int] = []
    while node != NO_PARENT:
        tokens.insert(0, draft.token_ids[node])
        node = draft.parents[node]
    return tokens


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_threads=st.integers(1, 4))
def test_every_node_sees_its_path_and_nothing_else(tree_model: TreeModel, seed: int, num_threads: int) -> None:
    random, cache = Random(seed), tree_model.new_cache()
    shared = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 6))]
    root = tree_model.forward(cache, [Work([], shared, Draft())])[0].slots
    paths, works = [], []
    for _ in range(num_threads):
        own = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 4))]
        paths.append([*shared, *own])
        works.append(Work(root, own, random_draft(random, random.randint(0, 9))))
    for path, work, computed in zip(paths, works, tree_model.forward(cache, works), strict=True):
        assert computed.logits_nv.shape == (1 + len(work.draft), VOCAB_SIZE)
        for node in range(NO_PARENT, len(work.draft)):
            expected = plain_logits(tree_model.hf, [*path, *path_to(work.draft, node)])
            torch.testing.assert_close(computed.logits_nv[1 + node], expected, atol=FLOAT32_ERROR, rtol=0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_an_accepted_path_may_stay_where_it_is(tree_model: TreeModel, seed: int) -> None:
    """Step by step along random nodes, the slots of all others given back and taken again."""
    random, cache = Random(seed), tree_model.new_cache()
    path, slots, pending = [5, 6, 7], list[int](), 3
    for _ in range(4):
        draft = random_draft(random, 8)
        computed = tree_model.forward(cache, [Work(slots, path[-pending:], draft)])[0]
        expected = plain_logits(tree_model.hf, path)
        torch.testing.assert_close(computed.logits_nv[0], expected, atol=FLOAT32_ERROR, rtol=0)
        node, chosen = random.randrange(8), list[int]()
        while node != NO_PARENT:
            chosen.insert(0, node)
            node = draft.parents[node]
        kept = [*computed.slots[:pending], *(computed.slots[pending + node] for node in chosen)]
        cache.pool.release(set(computed.slots) - set(kept))
        slots += kept
        path += [*(draft.token_ids[node] for node in chosen), random.randrange(VOCAB_SIZE)]
        pending = 1
    assert cache.pool.num_used == len(slots) == len(path) - 1


def test_the_hidden_state_is_what_the_output_embedding_reads(tree_model: TreeModel) -> None:
    computed = tree_model.forward(tree_model.new_cache(), [Work([], [5, 6, 7], Draft([8], [NO_PARENT]))])[0]
    with torch.inference_mode():
        logits = tree_model.hf.get_output_embeddings()(computed.hidden_nh)
    torch.testing.assert_close(logits, computed.logits_nv)


def _random(**config: Any) -> Any:
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**common, **config}))


def test_learned_positions_work_too() -> None:
    TreeModel(_random(model_type="gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=64))


def test_a_window_bounds_the_length() -> None:
    config = {"model_type": "mistral", "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 24}
    assert TreeModel(_random(**config)).max_model_len == 24


@pytest.mark.parametrize("config", [{"model_type": "bloom"}, {"model_type": "mamba"}], ids=["alibi", "recurrent"])
def test_a_model_without_trees_is_refused_when_it_is_loaded(config: dict[str, Any]) -> None:
    with pytest.raises(DecodingError, match=r"trees of tokens|tree masks|positions"):
        TreeModel(_random(**config))


def test_attention_that_takes_no_masks_is_refused(tiny_folder: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="flex_attention")
    with pytest.raises(DecodingError, match="flex_attention attention, which takes no tree masks"):
        TreeModel(hf)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DecodingError, match="cannot be loaded on cpu"):
        load_model(tmp_path)


def test_low_precision_passes_the_probe(tmp_path: Path) -> None:
    load_model(make_tiny_model(tmp_path / "tiny"), "bfloat16")
