"""Conversations as trainers read them: a column `messages`, or ShareGPT's `conversations`."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.dataset.options import DATASET_FORMATS

Message = dict[str, str]

_MESSAGES = pa.field("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))
_CONVERSATIONS = pa.field("conversations", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])))
SHAREGPT_ROLES = {"user": "human", "assistant": "gpt", "developer": "system"}
"""Other roles keep their names."""


def conversation_field(format: str) -> pa.Field:
    """The column of a format that has conversations."""
    assert format in DATASET_FORMATS
    return _CONVERSATIONS if format == "sharegpt" else _MESSAGES


def as_cell(format: str, messages: Sequence[Message]) -> list[Message]:
    """A conversation as the column's cell."""
    if format == "messages":
        return list(messages)
    return [
        {"from": SHAREGPT_ROLES.get(message["role"], message["role"]), "value": message["content"]}
        for message in messages
    ]
