"""What is to be judged: the rows of a file of answers, or pairs of them, as items.

A row that cannot be judged (an answer that is null, a conversation that has not the turns) is an item with an error, so
that every row is accounted for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.columns import to_python
from jobs.errors import BadInput
from jobs.judging.rubrics import Kind
from jobs.messages import BadText, RowError, check_messages
from jobs.source import first_line, is_jsonl

MAX_ROWS = 1_000_000
"""Items and their prompts are sorted in memory."""
TOTAL = "all"
"""What the report calls all categories together."""
DEFAULTS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "response": ("response", "forq_output"),
    "reference": ("reference",),
    "response_a": ("response_a",),
    "response_b": ("response_b",),
    "prompt_2": ("prompt_2",),
    "response_2": ("response_2",),
    "reference_2": ("reference_2",),
    "response_a_2": ("response_a_2",),
    "response_b_2": ("response_b_2",),
    "messages": ("messages",),
    "model": ("model",),
    "model_a": ("model_a",),
    "model_b": ("model_b",),
    "category": ("category",),
    "id": ("id", "question_id"),
}
"""What columns are for, and the names they have by default, the first that is there."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answer, or one pair."""

    row: int
    """In the file, from 0; of a pair the first answer's."""
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
    num_turns: int
    num_rows: int
    num_unpaired: int = 0
    """Rows of a file with a model column that no other model's row was found for."""


def read_items(path: Path, kind: Kind, names: Mapping[str, str], limit: int | None = None) -> Items:
    """
    Args:
        names: column names by role (`DEFAULTS`), where they are not the defaults.
        limit: of questions: rows, or where answers are paired, questions with all their pairs.

    Raises:
        BadInput: not a readable Parquet file, a column that is missing, a role nobody knows, nothing to pair.
    """
    columns, roles = _read(path, names)
    num_rows = len(next(iter(columns.values())))
    paired = kind == "pairwise" and "response_a" not in roles
    num_turns = _num_turns(roles, kind)
    _check_roles(path, kind, roles, num_turns, paired)
    rows = [{name: values[i] for name, values in columns.items()} for i in range(num_rows)]
    if "category" in roles and any(row[roles["category"]] == TOTAL for row in rows):
        raise BadInput(f"{path.name}: a category is called {TOTAL!r}, as the total is: give it another name")
    if paired:
        items, num_unpaired = _pairs(path, rows, roles, num_turns)
        return Items(_limited(items, limit), num_turns, num_rows, num_unpaired)
    items = [_item(kind, number, row, roles, num_turns) for number, row in enumerate(rows)]
    return Items(items[:limit], num_turns, num_rows)


class _Unusable(Exception):
    """A row cannot be judged; says why."""


def _read(path: Path, names: Mapping[str, str]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    unknown = [role for role in names if role not in DEFAULTS]
    if unknown:
        raise BadInput(f"--column {unknown[0]}=…: there is no such role; use {', '.join(DEFAULTS)}")
    if is_jsonl(path):
        raise BadInput(f"{path.name} is JSONL: write the answers as Parquet")
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
            if not 0 < num_rows <= MAX_ROWS:
                raise BadInput(f"{path.name} has {num_rows} rows: 1 to {MAX_ROWS} can be judged at once; split it")
            if len(set(schema.names)) < len(schema.names):
                raise BadInput(f"{path.name} has a column name twice: rename one")
            roles = _roles(path, schema.names, names)
            # Only what a rubric can use: trees and the like stay in the file.
            kept = [f.name for f in schema if f.name in roles.values() or not f.name.startswith("forq_")]
            columns: dict[str, list[Any]] = {name: [] for name in kept}
            for batch in file.iter_batches(columns=kept, batch_size=1024):
                for name in kept:
                    columns[name] += to_python(batch.column(name))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path.name} is not a readable Parquet file ({first_line(error)}): write it again") from None
    return columns, roles


def _roles(path: Path, there: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    for role, name in names.items():
        if name not in there:
            raise BadInput(f"{path.name} has no column {name!r} for {role}; its columns: {', '.join(there)}")
    found = {role: next((name for name in defaults if name in there), None) for role, defaults in DEFAULTS.items()}
    return {role: name for role, name in {**found, **names}.items() if name is not None}


def _num_turns(roles: Mapping[str, str], kind: Kind) -> int:
    if "messages" in roles and "response" not in roles and "response_a" not in roles:
        return 2
    return 2 if "prompt_2" in roles else 1


def _check_roles(path: Path, kind: Kind, roles: Mapping[str, str], num_turns: int, paired: bool) -> None:
    if kind == "pairwise" and not paired:
        needed = ["prompt", "response_a", "response_b"]
    elif "messages" in roles and "response" not in roles:
        needed = ["messages"]
    else:
        needed = ["prompt", "response"]
    if kind == "reference":
        needed.append("reference")
    if num_turns == 2:
        needed += [f"{role}_2" for role in needed if role != "messages"]
    if paired:
        needed.append("model")
    missing = [role for role in needed if role not in roles]
    if missing:
        also = "; pairs are made of response_a and response_b, or of response and model" if kind == "pairwise" else ""
        raise BadInput(
            f"{path.name} has no column for {', '.join(missing)}: name it like --column {missing[0]}=NAME; its columns "
            f"are used for {', '.join(f'{role} ({name})' for role, name in roles.items()) or 'nothing'}{also}"
        )


def _item(kind: Kind, number: int, row: dict[str, Any], roles: Mapping[str, str], num_turns: int) -> Item:
    def text(role: str) -> str | None:
        return None if role not in roles or row[roles[role]] is None else _plain(row[roles[role]])

    facts: dict[str, Any] = {"row": number, "id": text("id"), "category": text("category")}
    if kind == "pairwise":
        facts |= {"model": text("model_a") or "a", "model_b": text("model_b") or "b"}
    else:
        facts["model"] = text("model")
    try:
        values = _values(row, roles, num_turns)
    except (_Unusable, RowError) as error:
        return Item(**facts, error=str(error))
    return Item(**facts, values=values)


def _values(row: dict[str, Any], roles: Mapping[str, str], num_turns: int) -> dict[str, Any]:
    """A row's columns, and over them what the rubrics speak of."""
    parts = ("prompt", "response", "reference", "response_a", "response_b")
    columns = {name: value for name, value in row.items() if not isinstance(value, BadText)}
    if "messages" in roles and "response" not in roles and "response_a" not in roles:
        turns = _turns_of(row[roles["messages"]])
        if "reference" in roles:
            for turn, role in zip(turns, ("reference", "reference_2"), strict=True):
                turn["reference"] = _text(row, roles, role)
    else:
        turns = [
            {part: _text(row, roles, f"{part}{suffix}") for part in parts if f"{part}{suffix}" in roles}
            for suffix in ("", "_2")[:num_turns]
        ]
    return {**columns, **turns[0], "turns": turns}


def _turns_of(value: Any) -> list[dict[str, str]]:
    messages = [message for message in check_messages(value) if message["role"] != "system"]
    if [message["role"] for message in messages] != ["user", "assistant"] * 2:
        raise _Unusable("the conversation is not two questions, each with an answer behind it")
    contents = [message["content"] for message in messages]
    return [{"prompt": contents[i], "response": contents[i + 1]} for i in (0, 2)]


def _text(row: dict[str, Any], roles: Mapping[str, str], role: str) -> str:
    value = row[roles[role]]
    if isinstance(value, BadText):
        raise _Unusable(f"column {roles[role]!r}: {value.message}")
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise _Unusable(f"column {roles[role]!r} is {kind}: it must be text to be judged")
    return value


def _plain(value: Any) -> str:
    return "" if isinstance(value, BadText) else str(value)


def _pairs(path: Path, rows: list[dict[str, Any]], roles: Mapping[str, str], num_turns: int) -> tuple[list[Item], int]:
    """Every two models that answered the same question, in the order of the file."""
    singles = [_item("pointwise", number, row, roles, num_turns) for number, row in enumerate(rows)]
    by_question: dict[str, dict[str, Item]] = {}
    models = {item.model: None for item in singles}
    if None in models:
        row = next(item.row for item in singles if item.model is None)
        raise BadInput(f"{path.name}: row {row} has no model: pairs need one in every row")
    for item in singles:
        key = item.id if item.id is not None else _plain(rows[item.row][roles["prompt"]])
        answers = by_question.setdefault(key, {})
        if item.model in answers:
            raise BadInput(
                f"{path.name}: rows {answers[str(item.model)].row} and {item.row} are answers of {item.model} to one "
                "question: keep one, or give the questions an id column"
            )
        answers[str(item.model)] = item
    pairs = [
        _pair(answers[a], answers[b])
        for answers in by_question.values()
        for a, b in combinations([str(model) for model in models if model in answers], 2)
    ]
    if not pairs:
        told_by = f"column {roles['id']!r}" if "id" in roles else "their prompts"
        raise BadInput(
            f"{path.name}: no question was answered by two models, so nothing can be paired; questions are told "
            f"apart by {told_by}: name another column with --column id=NAME"
        )
    return pairs, sum(1 for answers in by_question.values() if len(answers) == 1)


def _pair(a: Item, b: Item) -> Item:
    facts: dict[str, Any] = {
        "row": a.row,
        "row_b": b.row,
        "id": a.id,
        "category": a.category,
        "model": a.model,
        "model_b": b.model,
    }
    if a.error or b.error:
        return Item(**facts, error=a.error or b.error)
    if a.values["prompt"] != b.values["prompt"]:
        return Item(**facts, error="the two answers' prompts differ although their ids are the same")
    turns = [
        {"prompt": of_a["prompt"], "response_a": of_a["response"], "response_b": of_b["response"]}
        for of_a, of_b in zip(a.values["turns"], b.values["turns"], strict=True)
    ]
    common = {name: value for name, value in a.values.items() if name not in ("response", "turns", "model")}
    return Item(**facts, values={**common, **turns[0], "turns": turns})


def _limited(items: list[Item], limit: int | None) -> list[Item]:
    """All pairs of the first questions."""
    if limit is None:
        return items
    questions: dict[tuple[str | None, Any], None] = {}
    kept = []
    for item in items:
        key = (item.id, None if item.id is not None else item.values.get("prompt"))
        if key not in questions and len(questions) == limit:
            continue
        questions[key] = None
        kept.append(item)
    return kept
