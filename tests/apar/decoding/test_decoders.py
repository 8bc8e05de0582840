"""All decoders by name: speculation loses nothing, forking is the reference's, and the vLLM plugin says the same."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from decoding_support import CONTROL
from fitted_heads import fitted_heads
from scipy.stats import chi2_contingency
from tiny_models import EOS, FLOAT32_ERROR, MAX_MODEL_LEN, GapRecorder, make_tiny_model, random_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from apar.decoding import DECODERS, Decoder, DecodingError, SamplingOptions, TreeModel, load_model, make_decoder
from apar.options import ForkLimits
from apar.reference import ReferenceDecoder

PROMPTS = random_prompts(10, seed=12)
SPECULATING = [name for name in DECODERS if name not in ("ar", "apar")]


@pytest.fixture(scope="module")
def heads(tree_model: TreeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted_heads(tmp_path_factory.mktemp("heads") / "tiny", tree_model.hf, PROMPTS)


def named(name: str, model: TreeModel, heads: Path, **limits: int) -> Decoder:
    return make_decoder(name, model, control=CONTROL, eos_token_ids=[EOS], limits=ForkLimits(**limits), medusa=heads)


def sure(model: TreeModel, prompt: list[int], *, fork: bool, max_tokens: int) -> list[int] | None:
    """The sequential answer, unless float32's error may decide it."""
    gaps = GapRecorder()
    reference = ReferenceDecoder(model.hf, CONTROL, ForkLimits(), [EOS], MAX_MODEL_LEN, gaps)
    answer = reference.decode(prompt, max_tokens=max_tokens, fork=fork)
    return None if gaps.smallest_gap < FLOAT32_ERROR else answer.token_ids


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_answers_are_those_of_sequential_decoding(tree_model: TreeModel, heads: Path, name: str) -> None:
    decoder, accepted, compared = named(name, tree_model, heads), 0, 0
    for prompt in PROMPTS:
        want = sure(tree_model, prompt, fork=name.startswith("apar"), max_tokens=120)
        if want is None:
            continue
        result = decoder.decode(prompt, max_tokens=120)
        assert result.token_ids == want
        compared, accepted = compared + 1, accepted + result.drafting.accepted
    assert compared >= 8
    assert (accepted > 0) == (name in SPECULATING)


@pytest.mark.parametrize("name", SPECULATING)
def test_speculation_takes_fewer_forwards(tree_model: TreeModel, heads: Path, name: str) -> None:
    """On text that repeats itself, which is what a drafter without a model can guess."""
    speculating = named(name, tree_model, heads)
    plain = named("apar" if name.startswith("apar") else "ar", tree_model, heads)
    drafted = undrafted = 0
    for prompt in PROMPTS[:4]:
        drafted += speculating.decode(prompt, max_tokens=200, ignore_eos=True).drafting.forwards
        undrafted += plain.decode(prompt, max_tokens=200, ignore_eos=True).drafting.forwards
    assert drafted < undrafted


@pytest.fixture(scope="module")
def small_vocabulary() -> TreeModel:
    """Six tokens, so that every text of three tokens comes often enough to be counted."""
    import torch

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    hf = LlamaForCausalLM(config).float()
    with torch.no_grad():
        hf.lm_head.weight.normal_(0.0, 0.6)
    return TreeModel(hf)


@cache
def sampled_texts(
    model: TreeModel, name: str, temperature: float, top_p: float
) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each text of three tokens comes in 900, and how many drafted tokens were accepted."""
    decoder = make_decoder(name, model, control=None, eos_token_ids=[])
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(900):
        # The first tokens fill the drafter's pool; the last three are counted.
        result = decoder.decode([1, 2, 3, 1, 2], max_tokens=9, sampling=SamplingOptions(temperature, top_p, seed=seed))
        counts[tuple(result.token_ids[-3:])] += 1
        accepted += result.drafting.accepted
    return counts, accepted


@pytest.mark.parametrize("name", ["ptd", "lade"])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.85)], ids=["temperature", "temperature and top-p"]
)
def test_sampled_texts_come_as_often_as_without_drafts(
    small_vocabulary: TreeModel, name: str, temperature: float, top_p: float
) -> None:
    counts = {}
    counts[name], accepted = sampled_texts(small_vocabulary, name, temperature, top_p)
    counts["ar"], _ = sampled_texts(small_vocabulary, "ar", temperature, top_p)
    assert accepted > 500
    texts = sorted({text for counter in counts.values() for text in counter})
    common = [text for text in texts if sum(counter[text] for counter in counts.values()) >= 10]
    table = [
        [*(c[text] for text in common), sum(c[text] for text in texts if text not in common)] for c in counts.values()
    ]
    table = [
        list(column) for column in zip(*(column for column in zip(*table, strict=True) if sum(column)), strict=True)
    ]
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.fixture(scope="module")
def shared(in_process: None, tiny_folder: Path, tiny_reference: Any) -> Iterator[Any]:
    from engines import ROOMY, engine

    with engine(tiny_folder, ROOMY, tiny_reference) as started:
        yield started


@pytest.mark.engine
@pytest.mark.parametrize("name", ["apar", "apar+ptd", "apar+medusa"])
def test_the_vllm_plugin_gives_the_same_tokens(running: Any, tree_model: TreeModel, heads: Path, name: str) -> None:
    from engines import greedy

    outputs = running.run(PROMPTS, greedy(120))
    compared = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if sure(tree_model, prompt, fork=True, max_tokens=120) is not None:
            result = named(name, tree_model, heads).decode(prompt, max_tokens=120)
            assert list(output.outputs[0].token_ids) == result.token_ids
            compared += 1
    assert compared >= 8


def test_a_decoder_that_does_not_exist_is_refused(tree_model: TreeModel) -> None:
    with pytest.raises(DecodingError, match=r"decoder is 'eagle': use one of ar, apar, medusa, .*apar\+lade"):
        make_decoder("eagle", tree_model, control=None, eos_token_ids=[])


def test_medusa_without_heads_is_refused(tree_model: TreeModel) -> None:
    with pytest.raises(DecodingError, match=r"apar\+medusa needs trained heads.*forq train-medusa"):
        make_decoder("apar+medusa", tree_model, control=CONTROL, eos_token_ids=[EOS])


def test_heads_of_another_model_are_refused(tree_model: TreeModel, heads: Path, small_vocabulary: TreeModel) -> None:
    with pytest.raises(DecodingError, match=r"hidden size|vocabulary"):
        make_decoder("medusa", small_vocabulary, control=None, eos_token_ids=[], medusa=heads)


def test_low_precision_decodes(tmp_path: Path, heads: Path) -> None:
    model = load_model(make_tiny_model(tmp_path / "tiny"), "bfloat16")
    for name in DECODERS:
        assert named(name, model, heads).decode(PROMPTS[0], max_tokens=30).token_ids
