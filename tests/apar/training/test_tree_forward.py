"""The proof: one forward over packed trees gives the logits of plain causal forwards of every root-to-leaf path."""

from random import Random

import pytest
import torch
from synthetic_trees import CONTROL, random_nodes
from tiny_models import EOS, make_tiny_model
from transformers import AutoModelForCausalLM

from apar.training import attention
from apar.training.packing import Row, dense_mask
from apar.training.sequences import TreeSequence, linearise

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.nn.Module]:
    """The same weights with each attention."""
    attention.register()
    folder = make_tiny_model(tmp_path_factory.mktemp("proof") / "tiny")
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name).eval()
        for name in ("sdpa", attention.NAME)
    }


def random_trees(seed: int, count: int) -> list[TreeSequence]:
    random = Random(seed)
    made = []
    for _ in range(count):
        prompt = [random.randint(5, 100) for _ in range(random.randint(1, 9))]
        made.append(linearise(prompt, random_nodes(random, random.randint(0, 6)), CONTROL, EOS))
    return made


@torch.no_grad()
def tree_logits(models: dict[str, torch.nn.Module], name: str, row: Row) -> torch.Tensor:
    token_ids, positions, _ = row.tensors()
    masks = (
        attention.masks(row, torch.device("cpu"), torch.float32)
        if name == attention.NAME
        else {"attention_mask": dense_mask(row)}
    )
    output = models[name](input_ids=token_ids, position_ids=positions, use_cache=False, **masks)
    return output.logits[0]


@pytest.mark.parametrize("name", ["sdpa", attention.NAME])
@pytest.mark.parametrize("seed", range(5))
def test_logits_equal_plain_causal_forwards_of_every_path(
    models: dict[str, torch.nn.Module], name: str, seed: int
) -> None:
    row = Row(random_trees(seed, 1 + seed))
    logits = tree_logits(models, name, row)
    compared = 0
    for tree, (start, _) in zip(row.trees, row.spans(), strict=True):
        for leaf in tree.leaves():
            path = torch.from_numpy(tree.path(leaf)).long()
            with torch.no_grad():
                alone = models["sdpa"](torch.from_numpy(tree.token_ids).long()[path][None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[start + path], alone, atol=TOLERANCE, rtol=0)
            compared += len(path)
    assert compared >= row.num_tokens


@pytest.mark.parametrize("name", ["sdpa", attention.NAME])
def test_other_trees_in_the_row_change_nothing(models: dict[str, torch.nn.Module], name: str) -> None:
    first, second, third, other = random_trees(11, 4)
    logits = tree_logits(models, name, Row([first, second, third]))
    changed = tree_logits(models, name, Row([first, other, third]))
    torch.testing.assert_close(logits[: len(first)], changed[: len(first)], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[-len(third) :], changed[-len(third) :], atol=TOLERANCE, rtol=0)


def test_a_model_that_keeps_the_masks_to_itself_is_noticed() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="does not hand keyword arguments"):
        attention.tree_attention(torch.nn.Identity(), states, states, states, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flex_attention_on_cuda_equals_the_dense_mask_on_the_cpu(
    models: dict[str, torch.nn.Module], tmp_path: object
) -> None:
    row = Row(random_trees(3, 4))
    expected = tree_logits(models, "sdpa", row)
    device = torch.device("cuda")
    model = models["sdpa"]
    model.set_attn_implementation(attention.implementation(device))
    try:
        token_ids, positions, _ = row.tensors(device)
        masks = attention.masks(row, device, torch.float32)
        with torch.no_grad():
            output = model.to(device)(input_ids=token_ids, position_ids=positions, use_cache=False, **masks)
        torch.testing.assert_close(output.logits[0].cpu(), expected, atol=1e-3, rtol=0)
    finally:
        model.to("cpu").set_attn_implementation("sdpa")
