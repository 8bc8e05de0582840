"""Finds where in the output's text each node of a tree ends: the tree counts tokens, people read characters."""

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
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
    reached = [0]
    for token_id in output_ids:
        try:
            piece = stream.step(tokenizer, token_id) or ""
        except Exception as error:  # the library raises bare Exception; vLLM starts anew here, and so must we
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = DecodeStream(skip_special_tokens=True)
            piece = stream.step(tokenizer, token_id) or ""
        reached.append(reached[-1] + len(piece))
    return [min(reached[end], len(text)) for end in token_ends[:-1]] + [len(text)]
