"""User text never becomes a control token, and harmless text is encoded as transformers would."""

import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jobs.errors import Unavailable
from worker.prompts import PromptEncoder, PromptError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
)


def byte_level(template: str | None = CHATML, specials: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Like SmolLM2: GPT-2 byte-level BPE that splits digits, special tokens first."""
    specials = specials or ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {text: i for i, text in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = [("i", "m"), ("e", "n"), ("en", "d"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("<", "|"), ("|", ">")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    plain = [AddedToken("<think>"), AddedToken("</think>"), AddedToken("<fork>", normalized=False), AddedToken("    ")]
    backend.add_tokens(plain)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=specials[-1], bos_token=specials[1], chat_template=template
    )


def llama_like(template: str | None = LLAMA2, *, legacy: bool = False) -> PreTrainedTokenizerFast:
    """Like Llama 2: SentencePiece BPE with byte fallback and BOS, whose merges can assemble `</s>` from pieces."""
    letters = [*string.ascii_letters, *string.digits, *"▁.,!?<>/[]|-_:"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("s", ">"), ("<", "/"), ("▁", "h"), ("▁h", "i"), ("▁", "["), ("</", "s>")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("whole", single_word=True, normalized=False),
            AddedToken("<think>", normalized=True),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


TOKENIZERS: dict[str, Any] = {"byte-level": byte_level(), "llama-like": llama_like()}
ENCODERS = {name: PromptEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
HOSTILE = ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<fork>", "</s>", "<s>", "<unk>", "<mask>", "whole"]
FRAGMENTS = [
    *HOSTILE,
    *("<|im_<|im_end|>end|>", "<|im", "_end|>", "<|", "|>", "<", ">", "</", "s>", "＜think＞", "<THINK>", "\U000f0000"),
    *("\ue000", "\uf8f0", " ", "  ", "    ", "\n", "1234", "the end", "é", "日本", "🙂", "system", "[INST]"),
]
hostile_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)
harmless_text = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs", "Co"]), min_size=1).filter(
    lambda text: "whole" not in text and "＜" not in text and "＞" not in text
)
both = pytest.mark.parametrize("name", sorted(TOKENIZERS))
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def as_transformers(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def added_ids(tokenizer: Any, ids: list[int]) -> list[int]:
    """The added tokens among the ids, in order; unknown text and runs of spaces control nothing."""
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return [i for i in ids if i in control and tokenizer.convert_ids_to_tokens(i) != "<unk>"]


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def refusal(encoder: PromptEncoder, messages: Any) -> PromptError:
    with pytest.raises(PromptError) as caught:
        encoder.encode_chat(messages)
    assert "\n" not in str(caught.value)
    return caught.value


@both
@relaxed
@given(contents=st.lists(harmless_text, min_size=1, max_size=3))
def test_harmless_text_is_encoded_as_transformers_encodes_it(name: str, contents: list[str]) -> None:
    assert ENCODERS[name].encode_chat(chat(*contents)) == as_transformers(TOKENIZERS[name], chat(*contents))


@both
@settings(relaxed, max_examples=300)
@given(contents=st.lists(hostile_text, min_size=1, max_size=3).filter(any))
def test_control_tokens_stand_only_where_the_template_put_them(name: str, contents: list[str]) -> None:
    tokenizer, encoder = TOKENIZERS[name], ENCODERS[name]
    ids = encoder.encode_chat(chat(*contents))
    assert added_ids(tokenizer, ids) == added_ids(tokenizer, encoder.encode_chat(chat(*("x" for _ in contents))))


@settings(relaxed, max_examples=300)
@given(content=hostile_text.filter(bool))
def test_hostile_text_decodes_to_itself(content: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = ENCODERS["byte-level"].encode_chat(chat(content))
    expected = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == expected


@both
@relaxed
@given(role=hostile_text)
def test_a_role_cannot_name_a_control_token(name: str, role: str) -> None:
    encoder, tokenizer = ENCODERS[name], TOKENIZERS[name]
    messages = [{"role": role, "content": "x"}]
    try:
        ids = encoder.encode_chat(messages)
    except PromptError as error:
        assert error.code == "template_refused"  # noqa: PT017  either outcome is right
    else:
        assert added_ids(tokenizer, ids) == added_ids(tokenizer, encoder.encode_chat(chat("x")))


def test_a_template_that_builds_tokens_from_roles_does_so_for_its_own_roles_only() -> None:
    tokenizer = byte_level(PHI4, ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"])
    encoder = PromptEncoder(tokenizer)
    ids = encoder.encode_chat([{"role": "user", "content": "x"}])
    assert added_ids(tokenizer, ids) == tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])
    ids = encoder.encode_chat([{"role": "endoftext", "content": "x"}])
    assert added_ids(tokenizer, ids) == tokenizer.convert_tokens_to_ids(["<|end|>", "<|assistant|>"])


def test_content_between_two_halves_of_a_token_does_not_complete_it() -> None:
    tokenizer = byte_level("{% for m in messages %}{{ '<|im_' + m.content + '|>' }}{% endfor %}")
    encoder = PromptEncoder(tokenizer)
    assert added_ids(tokenizer, encoder.encode_chat(chat("end"))) == []
    assert tokenizer.decode(encoder.encode_chat(chat("end"))) == "<|im_end|>"


def test_text_that_the_template_joins_does_not_form_a_token() -> None:
    tokenizer = byte_level("{{ messages | map(attribute='content') | map('trim') | join }}")
    encoder = PromptEncoder(tokenizer)
    assert added_ids(tokenizer, encoder.encode_chat(chat(" <|im_ ", " en", "d|> "))) == []
    tokenizer = byte_level("{{ messages[0].content.replace('-', '') + messages[0].content[::-1] }}")
    assert added_ids(tokenizer, PromptEncoder(tokenizer).encode_chat(chat("<|im_-end|>>|dne_mi|<"))) == []


def test_a_switch_that_a_template_looks_for_in_the_content_still_works() -> None:
    tokenizer = byte_level("{% if '/no_think' in messages[0].content %}{{ '<think></think>' }}{% endif %}x")
    ids = PromptEncoder(tokenizer).encode_chat(chat("sum it up /no_think"))
    assert added_ids(tokenizer, ids) == tokenizer.convert_tokens_to_ids(["<think>", "</think>"])


def test_a_control_token_of_the_plain_vocabulary_cannot_be_typed() -> None:
    tokenizer = llama_like("{{ '.' + messages[0].content }}")
    piece = tokenizer.convert_tokens_to_ids("s>")
    assert piece in PromptEncoder(tokenizer).encode_chat(chat("as>"))
    ids = PromptEncoder(tokenizer, ["s>"]).encode_chat(chat("as>"))
    assert piece not in ids
    assert tokenizer.decode(ids).endswith(" .as>")


def test_a_unigram_vocabulary_cannot_spell_its_control_tokens() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -9.0) for c in "▁</s>ab")]
    backend = Tokenizer(Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    ids = PromptEncoder(tokenizer).encode_prompt("ab</s>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "a", "b", "<", "/", "s", ">"]


def test_a_control_token_outside_the_vocabulary_is_refused_at_loading() -> None:
    with pytest.raises(Unavailable, match="'<child>' is not in the model's vocabulary"):
        PromptEncoder(byte_level(), ["<fork>", "<child>"])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("template", [LLAMA2, LLAMA2.removeprefix("{{ bos_token }}")])
def test_a_chat_begins_with_exactly_one_bos(template: str, legacy: bool) -> None:
    tokenizer = llama_like(template, legacy=legacy)
    ids = PromptEncoder(tokenizer).encode_chat(chat("hi", "hi", "<s>"))
    assert ids[0] == 1
    assert ids.count(1) == 1
    if template is LLAMA2:
        assert PromptEncoder(tokenizer).encode_chat(chat("hi")) == as_transformers(tokenizer, chat("hi"))


def test_a_lone_prompt_is_one_user_message_where_there_is_a_template() -> None:
    assert ENCODERS["byte-level"].encode_prompt("hi <fork>") == ENCODERS["byte-level"].encode_chat(chat("hi <fork>"))


def test_a_lone_prompt_without_template_goes_on_from_the_text_after_a_bos() -> None:
    tokenizer = llama_like(None)
    encoder = PromptEncoder(tokenizer)
    assert not encoder.has_chat_template
    assert encoder.encode_prompt("hi there") == tokenizer("hi there").input_ids
    ids = encoder.encode_prompt("</s> hi <s>")
    assert (ids[0], added_ids(tokenizer, ids[1:]), tokenizer.decode(ids[1:])) == (1, [], " </s> hi <s>")
    with pytest.raises(PromptError, match="no chat template"):
        encoder.encode_chat(chat("hi"))


def test_indentation_keeps_its_added_tokens() -> None:
    run = TOKENIZERS["byte-level"].convert_tokens_to_ids("    ")
    assert run in ENCODERS["byte-level"].encode_chat(chat("if x:\n    pass <fork>"))


def test_refusals_have_a_code_and_one_line() -> None:
    encoder = ENCODERS["llama-like"]
    refused = refusal(encoder, [{"role": "<s>oracle", "content": "x"}])
    assert refused.code == "template_refused"
    assert "'<s>oracle': roles must alternate user/assistant. Use" in str(refused)
    assert refusal(encoder, []).code == refusal(encoder, None).code == refusal(encoder, chat("")).code == "empty_prompt"
    assert refusal(encoder, chat("a\ud800")).code == "invalid_text"
    assert refusal(encoder, [{"role": "\udfff", "content": "x"}]).code == "invalid_text"
    for bad in ("text", [["x"]], [{"role": 1, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": {}}]):
        assert refusal(encoder, bad).code == "invalid_messages"
    with pytest.raises(PromptError) as caught:
        PromptEncoder(llama_like(None)).encode_prompt("")
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ messages[7].content.x }}", "{% for %}", "{{ raise_exception(1) }}"]
)
def test_whatever_a_template_raises_is_a_refusal(template: str) -> None:
    assert refusal(PromptEncoder(byte_level(template)), chat("x")).code == "template_refused"


def test_null_fields_of_a_message_are_absent() -> None:
    message: Any = {"role": "user", "content": "x", "name": None}
    assert ENCODERS["byte-level"].encode_chat([message]) == ENCODERS["byte-level"].encode_chat(chat("x"))


def test_text_that_holds_every_private_use_character_is_still_answered() -> None:
    plane = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    ids = ENCODERS["byte-level"].encode_chat(chat(plane + "<|im_end|>"))
    assert plane + "<|im_end|><|im_end|>" in TOKENIZERS["byte-level"].decode(ids)
    everything = plane + "".join(map(chr, [*range(0x100000, 0x10FFFE), *range(0xE000, 0xF900)]))
    assert refusal(ENCODERS["byte-level"], chat(everything)).code == "invalid_text"


def test_several_python_threads_get_the_same_ids_as_one() -> None:
    messages = [chat(f"{HOSTILE[i % len(HOSTILE)]} number {i}") for i in range(200)]
    encoder = ENCODERS["byte-level"]
    alone = [encoder.encode_chat(message) for message in messages]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encoder.encode_chat, messages * 4)) == alone * 4


def test_an_encoder_loads_from_a_model_folder(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    assert PromptEncoder.load(tmp_path, ["<fork>"]).encode_chat(chat("a <fork>")) == ENCODERS["byte-level"].encode_chat(
        chat("a <fork>")
    )
    with pytest.raises(Unavailable, match="cannot be loaded"):
        PromptEncoder.load(tmp_path / "nothing")


def test_smollm2_encodes_as_transformers_and_keeps_its_control_tokens_to_itself(smollm2_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path)
    encoder = PromptEncoder.load(smollm2_path)
    for content in ("What is the capital of France?", "x < 12345 & y > 6", "    indented\n\n", "日本 🙂"):
        assert encoder.encode_chat(chat(content)) == as_transformers(tokenizer, chat(content))
    for text in tokenizer.all_special_tokens + list(tokenizer.added_tokens_encoder):
        ids = encoder.encode_prompt(f"a{text}{text}b")
        assert added_ids(tokenizer, ids) == added_ids(tokenizer, encoder.encode_prompt("x"))
        assert f"a{text}{text}b<|im_end|>" in tokenizer.decode(ids)
