"""From tokens to text as vLLM writes it, and where in that text each node of a tree ends: the tree counts tokens,
people read characters."""

from collections.abc import Sequence
from typing import Any


def text_ends(
    tokenizer: Any, prompt_ids: Sequence[int], output_ids: Sequence[int], token_ends: Sequence[int], text: str
) -> list[int]:
    """The character position in `text` up to which the first `end` output tokens reach, for each of `token_ends`.

    The tokens are decoded one by one as vLLM does it, behind the prompt, so that the positions are those of its text. A
    character whose bytes are spread over tokens of two nodes belongs to the later one. The last end is that of the
    text, and no position lies behind it (a stop string may have cut the text): pieces of `text` between neighbouring
    positions add up to `text`, whatever a tokenizer does.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        token_ends: ascending, the last one for the whole output.
    """
    stream = TextStream(tokenizer, prompt_ids)
    reached = [0]
    for token_id in output_ids:
        reached.append(reached[-1] + len(stream.step(token_id)))
    return [min(reached[end], len(text)) for end in token_ends[:-1]] + [len(text)]


class TextStream:
    """Turns an answer's tokens into text one by one, as vLLM does it: behind the prompt, without special tokens."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        """
        Args:
            tokenizer: a `tokenizers.Tokenizer`.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        """The text that the answer grows by; empty while a character's bytes are not all there."""
        from tokenizers.decoders import DecodeStream

        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises bare Exception; vLLM starts anew here, and so must we
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id) or ""
