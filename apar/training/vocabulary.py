"""Control tokens in a model's vocabulary, and text that never becomes one.

Receives a model folder; hands on a tokenizer that knows [Fork] and [Child] as ordinary added tokens, their ids, token
ids of prompts and answers, and a model whose embeddings have their rows.

Source: APAR paper, section 3.4.2. The paper says nothing about how the new rows begin; here they are the mean of all.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from apar.errors import InputError
from apar.options import ControlTokens

FORK_TEXT, CHILD_TEXT = "<|fork|>", "<|child|>"


class Vocabulary:
    """A base model's tokenizer with the two control tokens."""

    def __init__(self, base: Path, fork_text: str = FORK_TEXT, child_text: str = CHILD_TEXT) -> None:
        """Read the tokenizer, and add the control tokens that it does not have yet.

        Raises:
            InputError: no tokenizer that can be used, or no chat template.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError(f"{base} has no tokenizer that loads: {_first_line(error)}") from None
        if not tokenizer.is_fast:
            raise InputError(f"{base} has a slow tokenizer: add a tokenizer.json")
        if not tokenizer.chat_template:
            raise InputError(f"{base} has no chat template, so prompts cannot be written: add a chat_template.jinja")
        if fork_text == child_text:
            raise InputError(f"both control tokens are written {fork_text!r}: give them two texts")
        self.tokenizer: Any = tokenizer
        self.num_base_tokens = len(tokenizer)
        """Ids below this had rows of their own in the base model."""
        known = tokenizer.get_added_vocab()
        self.new_texts = [text for text in (fork_text, child_text) if text not in known]
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        if self.new_texts:
            from tokenizers import AddedToken

            tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in self.new_texts])
        fork, child = tokenizer.convert_tokens_to_ids([fork_text, child_text])
        self.control = ControlTokens(fork, child)
        self.texts = (fork_text, child_text)
        self.eos_token_id = _eos_token_id(tokenizer, base)
        self._guarded = sorted({*tokenizer.all_special_tokens, *_special_texts(backend), fork_text, child_text})
        self._plain = _plain_backend(backend, self.texts)
        self._anchor_ids = self._anchor()

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt as the model is asked: its chat template, up to where the answer begins."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not any(text in m["content"] for m in messages for text in self._guarded):
            rendered = self._render(messages)
            ids: list[int] = self.tokenizer(rendered, add_special_tokens=False).input_ids
            return ids
        # The rare prompt that spells a special or control token: its texts go in beside the template's, not through it.
        names = [f"\uf8f0{secrets.token_hex(8)}\uf8f1" for _ in messages]
        rendered = self._render([{**m, "content": name} for m, name in zip(messages, names, strict=True)])
        ids = []
        for message, name in zip(messages, names, strict=True):
            before, _, rendered = rendered.partition(name)
            ids += self.tokenizer(before, add_special_tokens=False).input_ids
            ids += self.encode_text(message["content"])
        return [*ids, *self.tokenizer(rendered, add_special_tokens=False).input_ids]

    def encode_text(self, text: str, *, follows: bool = False) -> list[int]:
        """A text on its own, without special and control tokens whatever it spells.

        Args:
            follows: that other text stands before it. Tokenizers that put a space before a text's first word must not
                do that here.
        """
        if not follows or not self._anchor_ids:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            return ids
        ids = self._plain.encode("\n" + text, add_special_tokens=False).ids
        if ids[: len(self._anchor_ids)] == self._anchor_ids:
            return ids[len(self._anchor_ids) :]
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of somebody else's
            raise ValueError(f"the chat template refuses its prompt ({_first_line(error)})") from None
        return text

    def _anchor(self) -> list[int]:
        """Tokens of the text to encode before another one, where one encoded alone would gain a space; else none."""
        first, second = (self._plain.encode(text, add_special_tokens=False).ids for text in ("x", "y"))
        if self._plain.decode([*first, *second], skip_special_tokens=False) == "xy":
            return []
        return list(self._plain.encode("\n", add_special_tokens=False).ids)


def fit_embeddings(model: Any, vocabulary: Vocabulary) -> None:
    """Give the new control tokens rows, the mean of the base's, in the input and the output embedding."""
    control = vocabulary.control
    top = max(control.fork, control.child) + 1
    if top > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(top, mean_resizing=False)
    new = vocabulary.tokenizer.convert_tokens_to_ids(vocabulary.new_texts)
    weights = {id(w): w for m in (model.get_input_embeddings(), model.get_output_embeddings()) for w in (m.weight,)}
    with torch.no_grad():
        for weight in weights.values():  # one, where they are tied
            if new:
                weight[new] = weight[: vocabulary.num_base_tokens].float().mean(0).to(weight.dtype)


def apar_config(vocabulary: Vocabulary, max_depth: int) -> dict[str, int]:
    """`config.json`'s key `apar`, as `apar.options.engine_options` reads it."""
    return {
        "fork_token_id": vocabulary.control.fork,
        "child_token_id": vocabulary.control.child,
        "max_depth": max_depth,
    }


def _eos_token_id(tokenizer: Any, base: Path) -> int:
    """The token that ends an answer in the chat template; of several EOS only one does."""
    candidates = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        said = json.loads((base / "generation_config.json").read_text("utf-8")).get("eos_token_id")
    except (OSError, ValueError):
        said = None
    candidates += said if isinstance(said, list) else [] if said is None else [said]
    if not candidates:
        raise InputError(f"{base} names no end-of-sequence token: set eos_token in tokenizer_config.json")
    user = [{"role": "user", "content": "x"}]
    try:
        asked = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        answered = tokenizer.apply_chat_template([*user, {"role": "assistant", "content": "x"}], tokenize=False)
    except Exception as error:  # a template is a program of somebody else's
        raise InputError(f"{base}: the chat template fails: {_first_line(error)}") from None
    behind = answered[len(asked) :] if answered.startswith(asked) else ""
    for token_id in tokenizer(behind, add_special_tokens=False).input_ids:
        if token_id in candidates:
            return int(token_id)
    return int(candidates[0])


def _special_texts(backend: Mapping[str, Any]) -> list[str]:
    return [token["content"] for token in backend["added_tokens"] if token["special"]]


def _plain_backend(backend: Mapping[str, Any], control_texts: Sequence[str]) -> Any:
    """The tokenizer without the control tokens, and blind to special ones."""
    from tokenizers import Tokenizer

    added = [token for token in backend["added_tokens"] if token["content"] not in control_texts]
    plain = Tokenizer.from_str(json.dumps({**backend, "added_tokens": added, "truncation": None, "padding": None}))
    plain.encode_special_tokens = True
    return plain


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
