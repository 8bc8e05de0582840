"""Where each node's text ends: the pieces are the output, and end where vLLM's own text stood at that token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from worker.texts import text_ends


def bytes_tokenizer() -> Tokenizer:
    """A token a byte, so that characters are spread over tokens; and a special token that is no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = bytes_tokenizer()
END = TOKENIZER.token_to_id("<end>")
PROMPT = TOKENIZER.encode("Q: ").ids


def pieces(text: str, ends: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_a_character_spread_over_two_nodes_belongs_to_the_later_one() -> None:
    ids = TOKENIZER.encode("aéb").ids  # é is two bytes
    assert len(ids) == 4
    assert pieces("aéb", text_ends(TOKENIZER, PROMPT, ids, [1, 2, 3, 4], "aéb")) == ["a", "", "é", "b"]


def test_special_tokens_and_what_a_stop_string_cut_off_are_no_text() -> None:
    ids = [*TOKENIZER.encode("one two").ids, END]
    assert text_ends(TOKENIZER, PROMPT, ids, [3, 8], "one two") == [3, 7]
    assert text_ends(TOKENIZER, PROMPT, ids, [3, 5, 8], "on") == [2, 2, 2]


def test_an_answer_without_text_has_empty_nodes() -> None:
    assert text_ends(TOKENIZER, PROMPT, [END], [0, 0, 1], "") == [0, 0, 0]


@given(st.text(max_size=30), st.lists(st.integers(0, 130), max_size=6), st.integers(0, 200))
def test_the_pieces_are_always_the_text(text: str, cuts: list[int], length: int) -> None:
    ids = TOKENIZER.encode(text).ids
    token_ends = [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    shown = text[:length]
    ends = text_ends(TOKENIZER, PROMPT, ids, token_ends, shown)
    assert ends == sorted(ends)
    assert "".join(pieces(shown, ends)) == shown


@settings(deadline=None)  # the first example imports vLLM
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_they_are_where_vllms_own_text_was_at_that_token_even_when_the_bytes_are_no_text(ids: list[int]) -> None:
    """Random bytes: broken characters come out as vLLM writes them, whatever that is."""
    reached = vllm_text_lengths(ids)
    text = "x" * reached[-1]
    assert text_ends(TOKENIZER, PROMPT, ids, list(range(1, len(ids) + 1)), text) == reached


def vllm_text_lengths(ids: list[int]) -> list[int]:
    pytest.importorskip("vllm")
    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=PROMPT, mm_features=None, sampling_params=SamplingParams(),
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    detokenizer = IncrementalDetokenizer.from_new_request(PreTrainedTokenizerFast(tokenizer_object=TOKENIZER), request)
    lengths = []
    for token_id in ids:
        detokenizer.update([token_id], False)
        lengths.append(len(detokenizer.get_next_output_text(True, False)))
    return lengths
