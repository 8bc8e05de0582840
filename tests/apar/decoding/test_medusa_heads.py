"""Heads as files: released ones, ours, and those that cannot be used."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from apar.decoding import DecodingError, TreeModel
from apar.decoding.medusa_heads import MedusaHeads, load_heads, save_heads

HIDDEN, VOCAB = 8, 20


def released_state(num_heads: int = 2, num_layers: int = 2) -> dict[str, Tensor]:
    """As the reference writes it: one block stands in both layers' places, and is in the file twice."""
    torch.manual_seed(0)
    state = {}
    for head in range(num_heads):
        weight, bias = torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN)
        for layer in range(num_layers):
            state |= {f"{head}.{layer}.linear.weight": weight, f"{head}.{layer}.linear.bias": bias}
        state[f"{head}.{num_layers}.weight"] = torch.randn(VOCAB, HIDDEN)
    return state


def released(folder: Path, state: dict[str, Tensor], **config: int) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 2, **config}))
    return folder


def model(hidden: int = HIDDEN, vocab: int = VOCAB) -> TreeModel:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    return TreeModel(LlamaForCausalLM(config))


def test_a_released_file_computes_what_the_paper_says(tmp_path: Path) -> None:
    state = released_state()
    heads = load_heads(released(tmp_path / "heads", state))
    hidden_nd = torch.randn(3, HIDDEN)
    expected = []
    for head in range(2):
        x = hidden_nd
        for layer in range(2):
            x = x + silu(x @ state[f"{head}.{layer}.linear.weight"].T + state[f"{head}.{layer}.linear.bias"])
        expected.append(x @ state[f"{head}.2.weight"].T)
    torch.testing.assert_close(heads(hidden_nd), torch.stack(expected))


@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 0), (2, 2), (5, 1), (11, 1)])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, num_heads: int, num_layers: int) -> None:
    heads = MedusaHeads(num_heads, num_layers, HIDDEN, VOCAB)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(heads, tmp_path, torch.float32)
    loaded = load_heads(tmp_path, model())
    assert {name: tuple(w.shape) for name, w in loaded.state_dict().items()} == {
        name: tuple(w.shape) for name, w in heads.state_dict().items()
    }
    hidden_nd = torch.randn(3, HIDDEN)
    torch.testing.assert_close(loaded(hidden_nd), heads(hidden_nd))


def test_the_names_are_those_of_released_files(tmp_path: Path) -> None:
    save_heads(MedusaHeads(2, 2, HIDDEN, VOCAB), tmp_path, torch.bfloat16)
    assert set(load_heads(tmp_path).state_dict()) == set(released_state())
    assert {weight.dtype for weight in load_heads(tmp_path).state_dict().values()} == {torch.bfloat16}


def test_untrained_heads_are_the_models_own_output_layer() -> None:
    lm_head_vd = torch.randn(VOCAB, HIDDEN)
    heads = MedusaHeads.beginning(lm_head_vd, 3, 2)
    hidden_nd = torch.randn(4, HIDDEN)
    torch.testing.assert_close(heads(hidden_nd), (hidden_nd @ lm_head_vd.T).expand(3, 4, VOCAB))
    first, second = heads.outputs()[:2]
    first.data += 1
    assert not torch.equal(first, second)  # copies


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (model(hidden=16), r"their hidden size is 8, this model's 16: train heads with `forq train-medusa` for this"),
        (model(vocab=22), r"their vocabulary is 20, this model's 22"),
    ],
)
def test_heads_of_another_model_are_refused(tmp_path: Path, model: TreeModel, message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        load_heads(released(tmp_path / "heads", released_state()), model)


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DecodingError, match=r"nowhere holds no Medusa heads, neither medusa_lm_head.safetensors nor"):
        load_heads(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_a_torn_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"half of a file")
    with pytest.raises(DecodingError, match=f"{name} cannot be read"):
        load_heads(tmp_path)


def test_weights_that_do_not_make_whole_heads_are_refused(tmp_path: Path) -> None:
    folder, whole = tmp_path / "heads", released_state()
    for missing in ("0.1.linear.bias", "1.2.weight", "0.2.weight"):
        with pytest.raises(DecodingError, match="not those of whole Medusa heads"):
            load_heads(released(folder, {name: w for name, w in whole.items() if name != missing}))
    with pytest.raises(DecodingError, match="has a weight 'token_map', which no Medusa head has"):
        load_heads(released(folder, {**whole, "token_map": torch.zeros(3)}))
    with pytest.raises(DecodingError, match=r"1.2.weight is 19 x 8, where these heads need 20 x 8"):
        load_heads(released(folder, {**whole, "1.2.weight": torch.zeros(VOCAB - 1, HIDDEN)}))
    with pytest.raises(DecodingError, match="says medusa_num_layers 1, the weights are of 2"):
        load_heads(released(folder, whole, medusa_num_layers=1))
    with pytest.raises(DecodingError, match="not those of whole Medusa heads"):
        load_heads(released(folder, {}))
