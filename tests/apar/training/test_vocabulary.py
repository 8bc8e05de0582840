"""Control tokens: added or found, their rows, and text that never becomes one."""

from pathlib import Path

import pytest
import torch
from synthetic_trees import make_base
from tiny_models import CHILD, FORK, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar.errors import InputError
from apar.training.vocabulary import Vocabulary, fit_embeddings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("vocabulary") / "base")


def test_new_control_tokens_are_ordinary_added_tokens(base: Path) -> None:
    vocabulary = Vocabulary(base)
    assert (vocabulary.control.fork, vocabulary.control.child) == (VOCAB_SIZE, VOCAB_SIZE + 1)
    decoded = vocabulary.tokenizer.decode([VOCAB_SIZE, VOCAB_SIZE + 1], skip_special_tokens=True)
    assert decoded == "<|fork|><|child|>"


def test_control_tokens_that_are_there_are_used(base: Path) -> None:
    vocabulary = Vocabulary(base, "[Fork]", "[Child]")
    assert (vocabulary.control.fork, vocabulary.control.child) == (FORK, CHILD)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = model.get_input_embeddings().weight.clone()
    fit_embeddings(model, vocabulary)
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("texts", [("<|fork|>", "<|child|>"), ("[Fork]", "[Child]")])
def test_text_that_spells_a_token_stays_text(base: Path, texts: tuple[str, str]) -> None:
    vocabulary = Vocabulary(base, *texts)
    guarded = {vocabulary.control.fork, vocabulary.control.child, 0, 1, 2}
    text = f"the {texts[0]} and {texts[1]} or </s> <s> <unk>"
    for ids in (vocabulary.encode_text(text), vocabulary.encode_prompt(text)):
        assert not guarded & set(ids)
        assert vocabulary.tokenizer.decode(ids).rstrip("\n") == text


def test_prompts_are_rendered_as_the_base_renders_them(base: Path) -> None:
    messages = [{"role": "user", "content": "the thing"}, {"role": "assistant", "content": "is on"}]
    expected = AutoTokenizer.from_pretrained(base).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert Vocabulary(base).encode_prompt(messages) == expected
    assert Vocabulary(base).encode_prompt("the thing") == Vocabulary(base).encode_prompt(messages[:1])


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_all_rows(tmp_path: Path, tied: bool) -> None:
    folder = make_base(tmp_path / "base", tied=tied)
    vocabulary, model = Vocabulary(folder), AutoModelForCausalLM.from_pretrained(folder)
    means = [m.weight.mean(0) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    fit_embeddings(model, vocabulary)
    for module, mean in zip((model.get_input_embeddings(), model.get_output_embeddings()), means, strict=True):
        assert module.weight.shape[0] == VOCAB_SIZE + 2
        for row in (VOCAB_SIZE, VOCAB_SIZE + 1):
            torch.testing.assert_close(module.weight[row], mean)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert model.config.vocab_size == VOCAB_SIZE + 2


def test_a_folder_without_a_tokenizer_or_template_is_refused_in_one_line(tmp_path: Path, base: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer that loads") as error:
        Vocabulary(tmp_path)
    assert "\n" not in str(error.value)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no chat template"):
        Vocabulary(tmp_path)


def test_two_control_tokens_need_two_texts(base: Path) -> None:
    with pytest.raises(InputError, match="two texts"):
        Vocabulary(base, "<|x|>", "<|x|>")


def test_a_text_that_follows_another_gains_no_space() -> None:
    """Tokenizers like Llama's put a space before the first word of any text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = ["<unk>", "▁", "\n", *"abcxy", "▁a", "▁b"]
    backend = Tokenizer(
        BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    vocabulary = Vocabulary.__new__(Vocabulary)
    vocabulary._plain = backend
    vocabulary._anchor_ids = vocabulary._anchor()
    first, second = vocabulary.encode_text("a b"), vocabulary.encode_text("b c", follows=True)
    assert backend.decode([*first, *second]) == "a bb c"
    third = vocabulary.encode_text(" b", follows=True)
    assert backend.decode([*first, *third]) == "a b b"
