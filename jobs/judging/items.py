"""What is to be judged: the rows of a file of answers, or pairs of them (`pairs`), as items.

A row that cannot be judged (an answer that is null, a text that is not UTF-8, a conversation that has not the turns) is
an item with an error, so that every row is accounted for.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.errors import BadInput
from jobs.judging.answers import PARTS, Answers
from jobs.messages import BadText, RowError, check_messages

TOTAL = "all"
"""What the report calls all categories together."""
UNREADABLE = "(unreadable)"
"""What it calls a model whose name cannot be read."""
MAX_NAME_CHARS = 1000
"""Of a model, a category or an id: they stand in every table."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answer, or one pair."""

    row: int
    """In the file, from 0; of a pair the first answer's."""
    question: str = ""
    """The same for all answers to one question: a hash of its id, or of its prompts."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the rubric is rendered with: its variables, and the row's own columns."""
    id: str | None = None
    category: str | None = None
    model: str | None = None
    model_b: str | None = None
    """Of a pair: `model` is then A's."""
    row_b: int | None = None
    """Of a pair from two rows."""
    error: str | None = None


@dataclass(frozen=True)
class Items:
    items: list[Item]
    num_rows: int
    num_unpaired: int = 0
    """Rows of a file with a model column that no other model's row was found for."""


class Unusable(Exception):
    """A row cannot be judged; says why."""


def item_of(answers: Answers, uses: Collection[str], number: int, row: Mapping[str, Any]) -> Item:
    """A row as an item.

    Args:
        uses: columns that the rubric uses.

    Raises:
        BadInput: its category is called as the total is.
    """
    names, fault = _names(row, answers.roles)
    if names["category"] == TOTAL:
        raise BadInput(f"{answers.path.name}: a category is called {TOTAL!r}, as the total is: give it another name")
    models: dict[str, str | None]
    if answers.kind == "pairwise" and not answers.is_paired:
        models = {"model": names["model_a"] or "a", "model_b": names["model_b"] or "b"}
    else:
        models = {"model": names["model"]}
    facts: dict[str, Any] = {"row": number, "id": names["id"], "category": names["category"], **models}
    turns: list[dict[str, str]] | None = None
    try:
        turns = _conversation(row, answers) if answers.has_conversations else _turns(row, answers)
        _check_columns(row, uses)
    except (Unusable, RowError) as error:
        fault = fault or str(error)
    facts["question"] = _question(names["id"], turns, answers, number, row)
    if fault is not None or turns is None:
        return Item(**facts, error=fault)
    columns = {name: row[name] for name in uses if name in row}
    return Item(**facts, values={**columns, **turns[0], "turns": turns})


def _names(row: Mapping[str, Any], roles: Mapping[str, str]) -> tuple[dict[str, str | None], str | None]:
    """The names in a row, by role, and what is wrong with one of them."""
    found: dict[str, str | None] = {}
    fault = None
    for role in ("id", "category", "model", "model_a", "model_b"):
        value = row[roles[role]] if role in roles else None
        try:
            found[role] = None if value is None else _name(value)
        except (Unusable, RowError) as error:
            found[role] = UNREADABLE if role.startswith("model") else None
            fault = fault or f"column {roles[role]!r}: {error}"
    return found, fault


def _name(value: Any) -> str:
    text = str(value)
    if len(text) > MAX_NAME_CHARS:
        raise Unusable(f"the name has {len(text)} characters, the limit is {MAX_NAME_CHARS}: shorten it")
    return text


def _turns(row: Mapping[str, Any], answers: Answers) -> list[dict[str, str]]:
    return [
        _turn(row, answers, {part: f"{part}{suffix}" for part in PARTS})
        for suffix in ("", "_2")[: answers.num_turns]
    ]  # fmt: skip


def _turn(row: Mapping[str, Any], answers: Answers, roles: Mapping[str, str]) -> dict[str, str]:
    """What judging needs as text, and what else there is of it."""
    turn = {}
    for part, role in roles.items():
        if part in answers.parts:
            turn[part] = _text(row, answers.roles[role])
        elif role in answers.roles and isinstance(value := row[answers.roles[role]], str):
            turn[part] = value
    return turn


def _conversation(row: Mapping[str, Any], answers: Answers) -> list[dict[str, str]]:
    messages = [message for message in check_messages(row[answers.roles["messages"]]) if message["role"] != "system"]
    if [message["role"] for message in messages] != ["user", "assistant"] * 2:
        raise Unusable("the conversation is not two questions, each with an answer behind it")
    contents = [message["content"] for message in messages]
    turns = [{"prompt": contents[i], "response": contents[i + 1]} for i in (0, 2)]
    for turn, role in zip(turns, ("reference", "reference_2"), strict=True):
        name = answers.roles.get(role)
        if answers.kind == "reference" and name is not None:
            turn["reference"] = _text(row, name)
        elif name is not None and isinstance(row[name], str):
            turn["reference"] = row[name]
    return turns


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, BadText):
        raise Unusable(f"column {name!r}: {value.message}")
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise Unusable(f"column {name!r} is {kind}: it must be text to be judged")
    return value


def _check_columns(row: Mapping[str, Any], uses: Collection[str]) -> None:
    for name in uses:
        if isinstance(value := row.get(name), BadText):
            raise Unusable(f"column {name!r}: {value.message}")


def _question(
    item_id: str | None, turns: list[dict[str, str]] | None, answers: Answers, number: int, row: Mapping[str, Any]
) -> str:
    """By its id, else by its prompts, also where its answer is missing. A row without either stands alone, and one
    whose id cannot be read: nobody knows what it belongs to."""
    prompts: list[Any] = [None]
    if turns is not None:
        prompts = [turn["prompt"] for turn in turns]
    elif not answers.has_conversations:
        prompts = [row[answers.roles[role]] for role in ("prompt", "prompt_2")[: answers.num_turns]]
    said: list[Any]
    if item_id is not None:
        said = ["id", item_id]
    elif all(isinstance(prompt, str) for prompt in prompts) and row.get(answers.roles.get("id", "")) is None:
        said = ["prompts", *prompts]
    else:
        said = ["row", number]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
