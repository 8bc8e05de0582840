"""Turns input rows into requests: the prompt or messages as JSON, the row's own sampling values, or the row's error.

A bad row never raises: it becomes a `PreparedRow` with an error code, so that all the others are answered.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from jinja2 import Template
from pydantic import BaseModel, ConfigDict

from jobs.batch_bodies import read_body
from jobs.columns import is_messages, is_text, to_python
from jobs.errors import BadInput
from jobs.faults import shown_names
from jobs.messages import MAX_MESSAGES, BadText, RowError, check_messages, storable, storable_error
from jobs.sampling import Sampling, parse_sampling, sampling_fields
from jobs.settings import Limits
from jobs.source import BATCH_LINE_SCHEMA, require_column
from jobs.templates import compile_template
from jobs.turns import MAX_TURNS, TurnTemplate

SAMPLING_COLUMN = "sampling"


class Mapping(BaseModel):
    """How a file's rows become prompts; stored with the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["prompt", "messages", "template", "batch_lines"]
    column: str | None = None
    template: str | None = None
    id_column: str | None = None
    has_sampling: bool = False
    system: str | None = None
    """A template, of the message that comes before all others."""
    turn: tuple[str, ...] = ()
    """Templates of the questions after the first answer."""

    def said(self) -> dict[str, Any]:
        """As plain data. What was not said is left out, where a job of a version before has no such key."""
        return self.model_dump(exclude={name for name in ("system", "turn") if not getattr(self, name)})


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row as it goes into the database. Either `payload` or `error_code` is set."""

    custom_id: str | None = None
    payload: str | None = None
    sampling: str | None = None
    error_code: str | None = None
    error: str | None = None


def make_mapping(
    schema: pa.Schema,
    path: Path,
    *,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | None = None,
    id_column: str | None = None,
    system: str | None = None,
    turn: tuple[str, ...] = (),
) -> Mapping:
    """Decide how rows become prompts, and check that the file has the columns with usable types.

    Raises:
        BadInput: more than one way given, a column missing or of another type, a template that does not parse or
            uses a column the file does not have, unknown fields in the `sampling` struct.
    """
    mapping = _first_question(schema, path, prompt_column, messages_column, template, id_column)
    if system is None and not turn:
        return mapping
    if mapping.kind == "batch_lines":
        raise BadInput(f"{path.name} holds OpenAI batch lines, each a whole request: --system and --turn do not apply")
    if len(turn) >= MAX_TURNS:
        raise BadInput(f"there are {len(turn) + 1} turns, the limit is {MAX_TURNS}")
    mapping = mapping.model_copy(update={"system": system, "turn": tuple(turn)})
    _later_templates(mapping, schema.names)
    return mapping


def _first_question(
    schema: pa.Schema,
    path: Path,
    prompt_column: str | None,
    messages_column: str | None,
    template: str | None,
    id_column: str | None,
) -> Mapping:
    given = [name for name in (prompt_column, messages_column, template) if name is not None]
    if len(given) > 1:
        raise BadInput("give one of --prompt-column, --messages-column and --template, not several")
    if id_column is not None:
        require_column(schema, id_column, path)
    has_sampling = _check_sampling_column(schema, path)
    if not given:
        if schema.names == BATCH_LINE_SCHEMA.names:
            return Mapping(kind="batch_lines", id_column=id_column or "custom_id")
        prompt_column = "prompt" if "prompt" in schema.names else None
        messages_column = "messages" if prompt_column is None and "messages" in schema.names else None
        if prompt_column is None and messages_column is None:
            raise BadInput(
                f"{path.name} has neither a 'prompt' nor a 'messages' column (its columns: "
                f"{shown_names(schema.names)}): say which to use with --prompt-column, --messages-column or --template"
            )
    if template is not None:
        compile_template(template, schema.names)
        return Mapping(kind="template", template=template, id_column=id_column, has_sampling=has_sampling)
    if prompt_column is not None:
        require_column(schema, prompt_column, path)
        field = schema.field(prompt_column)
        if not (is_text(field.type) or pa.types.is_null(field.type)):
            raise BadInput(f"column {prompt_column!r} has type {field.type}: prompts are strings")
        return Mapping(kind="prompt", column=prompt_column, id_column=id_column, has_sampling=has_sampling)
    assert messages_column is not None
    require_column(schema, messages_column, path)
    field = schema.field(messages_column)
    if not (is_text(field.type) or is_messages(field.type) or pa.types.is_null(field.type)):
        raise BadInput(
            f"column {messages_column!r} has type {field.type}: it must be list<struct<role, content>> or JSON strings"
        )
    return Mapping(kind="messages", column=messages_column, id_column=id_column, has_sampling=has_sampling)


def columns_of(mapping: Mapping) -> list[str] | None:
    """The columns to read; None for all (a template may use any)."""
    if mapping.kind == "template" or mapping.system is not None or mapping.turn:
        return None
    if mapping.kind == "batch_lines":
        return list(BATCH_LINE_SCHEMA.names)
    extra = [mapping.id_column, SAMPLING_COLUMN if mapping.has_sampling else None]
    return list(dict.fromkeys(name for name in [mapping.column, *extra] if name is not None))


class RowReader:
    """Prepares the rows of batches that all come from one file."""

    def __init__(
        self,
        mapping: Mapping,
        schema: pa.Schema,
        limits: Limits,
        model: str,
        decoding: str | None = "ar",
        also_called: str | None = None,
    ) -> None:
        """What batch lines may say: `model` or its other name `also_called`; `decoding`, any where it is None."""
        self._mapping = mapping
        self._limits = limits
        self._names = (model,) if also_called is None else (model, also_called)
        self._decoding = decoding
        self._template = compile_template(mapping.template, schema.names) if mapping.template is not None else None
        self._system, self._turns = _later_templates(mapping, schema.names)

    def prepare(self, batch: pa.RecordBatch) -> Iterator[PreparedRow]:
        """Yield one `PreparedRow` per row of the batch, in order."""
        columns = {name: to_python(batch.column(i)) for i, name in enumerate(batch.schema.names)}
        for index in range(batch.num_rows):
            row = {name: values[index] for name, values in columns.items()}
            yield self._prepare_row(row)

    def _prepare_row(self, row: dict[str, Any]) -> PreparedRow:
        custom_id = _id_text(row.get(self._mapping.id_column)) if self._mapping.id_column else None
        try:
            if self._mapping.kind == "batch_lines":
                payload, sampling = self._from_batch_line(row)
            else:
                payload = self._payload(row)
                sampling = self._sampling(row.get(SAMPLING_COLUMN)) if self._mapping.has_sampling else None
            text = json.dumps(payload, ensure_ascii=False)
            size = len(_encode(text))
        except RowError as error:
            return PreparedRow(custom_id=custom_id, error_code=error.code, error=storable_error(str(error)))
        limit = self._limits.max_cell_bytes
        if size > limit:
            message = f"the prompt has {size} bytes, the limit is {limit}: shorten it or raise limits.max_cell_bytes"
            return PreparedRow(custom_id=custom_id, error_code="prompt_too_large", error=message)
        return PreparedRow(custom_id=custom_id, payload=text, sampling=_sampling_json(sampling))

    def _payload(self, row: dict[str, Any]) -> dict[str, Any]:
        payload = self._first_payload(row)
        if self._system is None and not self._turns:
            return payload
        messages = payload.get("messages") or [{"role": "user", "content": payload["prompt"]}]
        if self._system is not None:
            messages = _with_system(messages, _rendered(self._system, row))
        if len(messages) + 2 * len(self._turns) > MAX_MESSAGES:
            raise RowError("invalid_messages", f"with its turns the row has over {MAX_MESSAGES} messages")
        turns = [_rendered(turn, row) for turn in self._turns]
        return {"messages": messages, "turns": turns} if turns else {"messages": messages}

    def _first_payload(self, row: dict[str, Any]) -> dict[str, Any]:
        if self._template is not None:
            return {"prompt": _check_prompt(_rendered(self._template, row), "the rendered template")}
        assert self._mapping.column is not None
        value = row[self._mapping.column]
        if self._mapping.kind == "prompt":
            return {"prompt": _check_prompt(value, f"column {self._mapping.column!r}")}
        return {"messages": check_messages(value)}

    def _sampling(self, value: Any) -> Sampling | None:
        if value is None:
            return None
        if isinstance(value, BadText):
            raise RowError("invalid_text", value.message)
        try:
            return parse_sampling(value, max_n=self._limits.max_n, max_max_tokens=self._limits.max_max_tokens)
        except BadInput as error:
            raise RowError("invalid_sampling", str(error)) from None

    def _from_batch_line(self, row: dict[str, Any]) -> tuple[dict[str, Any], Sampling | None]:
        if row["method"] != "POST":
            raise RowError("invalid_request", f"method is {row['method']!r}: only POST is served")
        payload, said = read_body(row["body"], row["url"], self._names, self._decoding)
        if "prompt" in payload:
            _check_prompt(payload["prompt"], "body.prompt")
        return payload, self._sampling(said)


def _later_templates(mapping: Mapping, columns: list[str]) -> tuple[Template | None, list[TurnTemplate]]:
    """Raises BadInput: one of them does not parse or uses a column the file does not have."""
    system = mapping.system
    first = compile_template(system, columns, "the system template") if system is not None else None
    return first, [TurnTemplate(source, columns, number) for number, source in enumerate(mapping.turn, start=2)]


def _rendered(template: Template | TurnTemplate, row: dict[str, Any]) -> Any:
    try:
        return template.render(row)
    except RowError:
        raise
    except Exception as error:  # any filter or operator of a user's template may raise anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RowError("template_failed", f"the template failed on this row: {text}") from None


def _with_system(messages: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    """Text of white space alone is none: a template may leave the message out on some rows."""
    if not text.strip():
        return messages
    if any(message["role"] == "system" for message in messages):
        raise RowError("invalid_messages", "the conversation has a system message: leave it out, or --system")
    return [{"role": "system", "content": text}, *messages]


def _check_prompt(value: Any, what: str) -> str:
    if isinstance(value, BadText):
        raise RowError("invalid_text", value.message)
    if value is None:
        raise RowError("empty_prompt", f"{what} is null: a prompt needs text")
    if not isinstance(value, str):
        raise RowError("invalid_prompt", f"{what} is a {type(value).__name__}: a prompt is a string")
    if not value.strip():
        raise RowError("empty_prompt", f"{what} is empty: a prompt needs text")
    return value


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        message = "the text holds half of a surrogate pair, which is not Unicode: write it again as valid UTF-8"
        raise RowError("invalid_text", message) from None


def _sampling_json(sampling: Sampling | None) -> str | None:
    said = sampling.said() if sampling is not None else {}
    return json.dumps(said) if said else None


def _id_text(value: Any) -> str | None:
    if value is None or isinstance(value, BadText):
        return None
    if isinstance(value, bool | int | float | list | dict):
        value = json.dumps(value, default=str)
    return storable(str(value))


def _check_sampling_column(schema: pa.Schema, path: Path) -> bool:
    if SAMPLING_COLUMN not in schema.names:
        return False
    kind = schema.field(SAMPLING_COLUMN).type
    if not pa.types.is_struct(kind):
        raise BadInput(f"{path.name}: column 'sampling' has type {kind}: it must be a struct, or have another name")
    names = [kind.field(i).name for i in range(kind.num_fields)]
    unknown = [name for name in names if name not in sampling_fields()]
    if unknown:
        raise BadInput(
            f"{path.name}: the sampling struct has unknown field(s) {', '.join(unknown)}: "
            f"use {', '.join(sorted(sampling_fields()))}"
        )
    return True
