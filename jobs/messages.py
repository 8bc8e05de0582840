"""Checks one row's conversation: a list of messages, each with a role and text content, or JSON text of such a list."""

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_MESSAGES = 1024
MAX_ERROR_CHARS = 1000
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(text: str) -> str:
    """Text that every database takes: PostgreSQL refuses NUL, and nothing can encode half of a surrogate pair."""
    return _UNSTORABLE.sub("\ufffd", text)


def storable_error(text: str) -> str:
    """A row's error as one line: it may quote the row, which may hold anything, of any length."""
    line = " ".join(storable(text).split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."


class RowError(Exception):
    """One row cannot be asked; carries the code and the sentence that end up in the row's result."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class BadText:
    """Stands for a text that is not UTF-8, so that the row it is in can be refused alone."""

    message: str

    def __str__(self) -> str:
        raise RowError("invalid_text", self.message)


def check_messages(value: Any) -> list[dict[str, str]]:
    """Read a conversation, from a list or from JSON text: `role` and `content` of each message, both strings.

    Raises:
        RowError: none, too many, not a list, or a message without a role or with content that is not text.
    """
    if isinstance(value, BadText):
        raise RowError("invalid_text", value.message)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(
                "invalid_messages", "messages are not valid JSON: write a list of role and content"
            ) from None
    if not value:
        raise RowError("empty_prompt", "there are no messages: at least 1 is needed")
    if not isinstance(value, list):
        raise RowError("invalid_messages", f"messages are a {type(value).__name__}: write a list of role and content")
    if len(value) > MAX_MESSAGES:
        raise RowError("invalid_messages", f"there are {len(value)} messages, the limit is {MAX_MESSAGES}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise RowError("invalid_messages", f"message {number} is not an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RowError("invalid_messages", f"message {number} has no role")
        if isinstance(content, list):
            content = _text_parts(content, number)
        if not isinstance(content, str):
            kind = "null" if content is None else type(content).__name__
            raise RowError("invalid_messages", f"message {number} has content of type {kind}: it must be text")
        messages.append({"role": role, "content": content})
    if not any(message["content"].strip() for message in messages):
        raise RowError("empty_prompt", "every message is empty: at least one needs text")
    return messages


def _text_parts(parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowError("invalid_messages", f"message {number} has a part that is not text: only text is served")
        texts.append(part["text"])
    return "".join(texts)
