"""Turns a request's messages or prompt into token ids, so that user text never becomes a control token.

Receives messages or text from a row; hands token ids to the engine. The usual way (render the template, tokenise the
result) lets a user write `<|im_end|>` and speak as the system. Here every *guarded* token (each added token of the
tokenizer, each APAR control token) loses its text, and two steps keep the template's own tokens working:

1. Before rendering, the characters that begin or end a guarded token are *shielded* in the user's strings: replaced
   one for one by private-use characters that occur in none of them. Whatever the template strips, cuts or joins, a
   guarded token that appears in the rendered text is the template's own.
2. Those are replaced by *aliases*: random names under which a second tokenizer knows the guarded ids, and the only
   names it knows them by. Then the shield is taken off and the whole text encoded in one call, so that prefix spaces
   and stripping around tokens come out as they do without us.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs.errors import ForqError, Unavailable

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SHIELD_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))
"""Unicode's private-use areas, half-open; the rarest first."""
_PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")


class PromptError(ForqError):
    """This request's messages or prompt cannot be encoded; other requests can. `code` is stable, the message is not."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PromptEncoder:
    """Encodes prompts for one model. Immutable once made: any number of Python threads may share it."""

    def __init__(self, tokenizer: Any, control_tokens: Sequence[str] = ()) -> None:
        """Prepare the tokenizer with aliases; prefer `load`.

        Raises:
            Unavailable: if a control token is not in the vocabulary, or the tokenizer's format has no aliases.
        """
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._template: str | None = (template.get("default") if isinstance(template, dict) else template) or None
        original = json.loads(tokenizer.backend_tokenizer.to_str())
        guarded = _guarded_tokens(original, tokenizer.backend_tokenizer, control_tokens)
        model = original["model"]
        unknown = model.get("unk_id", tokenizer.backend_tokenizer.token_to_id(model.get("unk_token") or ""))
        nonce = secrets.token_hex(8)
        self._aliases = {text: f"\uf8f0{nonce}-{token_id:x}\uf8f1" for text, (token_id, _) in guarded.items()}
        self._ids = {text: token_id for text, (token_id, _) in guarded.items()}
        self._backend = _aliased_backend(original, self._aliases, self._ids)
        # Text outside the vocabulary rightly becomes the unknown token, unless that token also controls something.
        controls = {tokenizer.bos_token_id, tokenizer.eos_token_id, *(self._ids[text] for text in control_tokens)}
        self._guarded_ids = frozenset(self._ids.values()) - ({unknown} - controls)
        # Longest first: where one token begins with another, the tokenizers library takes the longer.
        patterns = [
            rf"(?<!\w){re.escape(text)}(?!\w)" if single_word else re.escape(text)
            for text, (_, single_word) in sorted(guarded.items(), key=lambda item: -len(item[0]))
        ]
        self._own_token = re.compile("|".join(patterns) or r"(?!)")
        usual = tokenizer("").input_ids
        bos = tokenizer.bos_token_id
        self._bos: int | None = bos if bos is not None and usual[:1] == [bos] else None
        self._trusted_roles = frozenset(
            role
            for role in _ROLES | set(re.findall(r"""["'](\w+)["']""", self._template or ""))
            if not self._own_token.search(role)
        )
        self._alphabet = {character for text in guarded for character in text}
        self._edges = {text[0] for text in guarded} | {text[-1] for text in guarded}
        if self._template is not None and self._wraps_content(guarded):
            self._edges = self._alphabet
        # Private-use characters that the rendered text may hold without the user.
        self._taken = set(_PRIVATE_USE.findall("".join([self._template or "", *guarded, *self._aliases.values()])))

    @classmethod
    def load(cls, model_path: Path, control_tokens: Sequence[str] = ()) -> "PromptEncoder":
        """Read the tokenizer of a model folder.

        Raises:
            Unavailable: if it cannot be used.
        """
        return cls(load_tokenizer(model_path), control_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def decoder(self) -> Any:
        """The model's own `tokenizers.Tokenizer`, control tokens and all: for ids that the model made."""
        return self._tokenizer.backend_tokenizer

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render the messages with the model's chat template, ready for the answer, and encode them.

        Raises:
            PromptError: `empty_prompt`, `invalid_text` (lone surrogates), `invalid_messages` (a role or content is
                missing, or a value is no string), `no_chat_template`, `template_refused`, `unsafe_tokenizer`.
        """
        if self._template is None:
            raise PromptError("no_chat_template", "the model has no chat template: send a prompt, not messages")
        messages = _checked_messages(messages)
        shield = self._shield_for(value for message in messages for value in message.values())
        unshield = {ord(cover): character for character, cover in shield.items()}
        edges = {ord(character): shield[character] for character in self._edges}
        everything = {ord(character): cover for character, cover in shield.items()}

        def cover(key: str, value: str) -> str:
            if key != "role":
                return value.translate(edges)
            # Templates compare roles, and some build tokens from them (`<|` + role + `|>`): only roles that cannot
            # name a token by accident pass as they are.
            return value if value in self._trusted_roles else value.translate(everything)

        covered = [{key: cover(key, value) for key, value in message.items()} for message in messages]
        try:
            rendered = self._render(covered)
        except Exception as error:  # jinja's own errors, and whatever an expression in the template raises
            reason = " ".join(str(error).translate(unshield).split())[:200] or type(error).__name__
            roles = ", ".join(dict.fromkeys(message["role"][:40] for message in messages))
            raise PromptError(
                "template_refused",
                f"the model's chat template refused {len(messages)} messages with roles {roles!r}: {reason}. "
                "Use the roles and the order it accepts",
            ) from error
        own = self._own_token.findall(rendered)
        aliased = self._own_token.sub(lambda match: self._aliases[match[0]], rendered)
        return self._finish(aliased.translate(unshield), [self._ids[text] for text in own])

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a lone prompt: as one user message if the model has a chat template, else as text to go on from.

        Raises:
            PromptError: as `encode_chat`.
        """
        if self._template is not None:
            return self.encode_chat([{"role": "user", "content": text}])
        return self.encode_text(text)

    def encode_text(self, text: str) -> list[int]:
        """Encode text for the model to go on from, without a chat template.

        Raises:
            PromptError: `empty_prompt`, `invalid_text`, `unsafe_tokenizer`.
        """
        _check_text("the prompt", text)
        if not text:
            raise PromptError("empty_prompt", "the prompt is empty: it needs at least one character")
        return self._finish(text, [])

    def _render(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        return rendered

    def _shield_for(self, texts: Iterable[str]) -> dict[str, str]:
        """Map each character of a guarded token to a private-use character that occurs in none of the texts."""
        needed = sorted(self._alphabet)
        used = self._taken.union(*map(_PRIVATE_USE.findall, texts))
        for first, end in _SHIELD_RANGES:
            for start in range(first, end - len(needed), max(1, len(needed))):
                covers = [chr(start + offset) for offset in range(len(needed))]
                if used.isdisjoint(covers):
                    return dict(zip(needed, covers, strict=True))
        raise PromptError("invalid_text", "the messages use up all private-use characters of Unicode: remove some")

    def _finish(self, text: str, own_ids: list[int]) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        found = [token_id for token_id in ids if token_id in self._guarded_ids]
        if found != [token_id for token_id in own_ids if token_id in self._guarded_ids]:
            # Cannot happen with the tokenizer kinds we know. Should one split an alias, no answer beats a forged one.
            raise PromptError("unsafe_tokenizer", "the tokenizer does not keep control tokens apart: use another model")
        if self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def _wraps_content(self, guarded: Iterable[str]) -> bool:
        """Tell whether the template might put content between two halves of a guarded token.

        Shielding the first and last character of each token would then not do, as the user would only need to supply
        the middle; all characters that occur in guarded tokens are shielded instead.
        """
        probe = "\U0010fff0"
        sides: set[tuple[str, str]] = set()
        for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
            messages = [{"role": role, "content": probe} for role in roles]
            try:
                text = self._render(messages)
            except Exception:  # noqa: S112  a role this template refuses puts nothing around content
                continue
            pieces = text.split(probe)
            sides |= set(pairwise(pieces))
        return any(
            any(before.endswith(token[:cut]) for cut in range(1, len(token)))
            and any(after.startswith(token[cut:]) for cut in range(1, len(token)))
            for token in guarded
            for before, after in sides
        )


def load_tokenizer(model_path: Path) -> Any:
    """Read the tokenizer of a model folder. Code that the folder brings is never run.

    Raises:
        Unavailable: if it cannot be used.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises what it likes here
        reason = " ".join(str(error).split())[:200]
        raise Unavailable(f"the tokenizer in {model_path} cannot be loaded: {reason}. Check the folder") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise Unavailable("the model's tokenizer has no tokenizer.json: convert it with transformers first")
    return tokenizer


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    checked: list[dict[str, str]] = []
    for number, message in enumerate(messages or [], start=1):
        if not isinstance(message, Mapping):
            raise PromptError("invalid_messages", f"message {number} is a {type(message).__name__}: send an object")
        # A table of structs gives every row every key: null stands for absent.
        present = {"role": None, "content": None} | {k: v for k, v in message.items() if v is not None}
        for key, value in present.items():
            _check_text(f"{key!r} of message {number}", value)
        checked.append(present)
    if not any(message["content"] for message in checked):
        raise PromptError("empty_prompt", f"{len(checked)} messages hold no text: send one with content")
    return checked


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise PromptError("invalid_messages", f"{what} is {found}: it must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            "invalid_text",
            f"{what} has a lone surrogate U+{ord(value[error.start]):04X} at character {error.start}, "
            "which no UTF-8 text can hold: remove it",
        ) from None


def _guarded_tokens(data: dict[str, Any], backend: Any, control_tokens: Sequence[str]) -> dict[str, tuple[int, bool]]:
    """Guarded text → (token id, whether it matches whole words only).

    Added tokens that are runs of spaces are left alone: they control nothing, and models read indentation by them.
    """
    guarded: dict[str, tuple[int, bool]] = {}
    for token in data["added_tokens"]:
        if token["special"] or token["content"].strip(" \t\r\n▁"):
            guarded[token["content"]] = token["id"], token["single_word"]
    for text in control_tokens:
        token_id = backend.token_to_id(text)
        if token_id is None or not text:
            raise Unavailable(f"control token {text!r} is not in the model's vocabulary: train the model with it first")
        guarded.setdefault(text, (token_id, False))
    return guarded


def _aliased_backend(data: dict[str, Any], aliases: Mapping[str, str], ids: Mapping[str, int]) -> Any:
    """Build a tokenizer like `data` that knows the guarded tokens by their aliases only.

    The vocabulary's own entries are renamed too: some models can assemble a control token from ordinary pieces.

    Raises:
        Unavailable: if an id would change.
    """
    from tokenizers import Tokenizer

    model = data["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):  # unigram: [text, score], where the place in the list is the id
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [
            [left, right] for left, right in pairs if aliases.keys().isdisjoint((left, right, left + right))
        ]
    listed = {token["content"] for token in data["added_tokens"]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    control = [{"id": ids[text], "content": text, **plain} for text in ids if text not in listed]
    data["added_tokens"] = [
        {**token, "content": aliases.get(token["content"], token["content"])}
        for token in [*data["added_tokens"], *control]
    ]
    if '"Prepend"' in json.dumps(data["normalizer"]):
        # Matched after such a normaliser, a token is found at the start of the text only, the template's own too.
        data["added_tokens"] = [{**token, "normalized": False} for token in data["added_tokens"]]
    data |= {"truncation": None, "padding": None, "post_processor": None}
    try:
        backend = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exception
        raise Unavailable(f"the tokenizer cannot guard its control tokens: {error}. Use another model") from error
    for text, alias in aliases.items():
        probe = backend.encode(f". {alias} .", add_special_tokens=False)
        covering = [i for i, (start, end) in zip(probe.ids, probe.offsets, strict=True) if start <= 2 < end]
        if covering != [ids[text]]:
            raise Unavailable(f"the tokenizer cannot guard its token {text!r}. Use another model")
    return backend
