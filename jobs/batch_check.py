"""Checks the lines of a batch's JSONL file before it becomes a job: what refuses the file as a whole, by line.

It runs where submitted files are read (jobs/confined.py): the bytes are a stranger's. What is wrong with one body only,
a sampling value or a prompt, is not looked for here; that row is refused later and all others are answered.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import BadInput
from jobs.source import Progress, first_line

MAX_FAULTS = 100
"""Of one file; what comes after them is not looked at."""
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class BatchRules:
    """What the lines of a batch must agree with."""

    endpoint: str
    aliases: tuple[str, ...]
    default_model: str
    """Of bodies that name none."""
    model: str | None
    """Said for the whole batch: bodies may name no other."""
    decoding: str | None
    max_lines: int
    max_bytes: int


@dataclass(frozen=True)
class Agreed:
    """What all lines say."""

    model: str
    decoding: str


class RefusedLines(BadInput):
    """The file is refused; `faults` are OpenAI's: code, line, message, param."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        where = f"line {faults[0]['line']}: " if faults[0]["line"] is not None else ""
        super().__init__(f"{where}{faults[0]['message']}{more}")
        self.faults = faults


class _FaultError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def fault(code: str, message: str, *, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}


def check_lines(path: Path, rules: BatchRules, max_line_bytes: int, report: Progress) -> Agreed:
    """
    Raises:
        RefusedLines: with up to `MAX_FAULTS` faults.
    """
    num_bytes = path.stat().st_size
    if num_bytes > rules.max_bytes:
        message = f"the file has {num_bytes} bytes, the limit is {rules.max_bytes}: split it"
        raise RefusedLines([fault("file_too_large", message)])
    lines = _Lines(rules)
    faults: list[dict[str, Any]] = []
    for number, line, is_whole in _numbered(path, max_line_bytes):
        if number % 1024 == 0:
            report("checking", number, 0)
        if not line.strip():
            continue
        try:
            if not is_whole:
                raise _FaultError("line_too_long", f"the line has over {max_line_bytes} bytes: shorten it")
            lines.check(line)
        except _FaultError as error:
            faults.append(fault(error.code, str(error), line=number, param=error.param))
        if lines.num > rules.max_lines:
            message = f"the file has over {rules.max_lines} lines: split it"
            faults.append(fault("too_many_tasks", message, line=number))
            break
        if len(faults) == MAX_FAULTS:
            break
    if faults:
        raise RefusedLines(faults)
    if lines.num == 0:
        raise RefusedLines([fault("empty_file", "the file has 0 lines: at least 1 is needed")])
    assert lines.model is not None
    assert lines.decoding is not None
    return Agreed(lines.model, lines.decoding)


def _numbered(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes, bool]]:
    """Lines with their numbers; of one that is too long only its beginning."""
    with path.open("rb") as file:
        number, is_start = 0, True
        while piece := file.readline(max_line_bytes + 1):
            is_whole = piece.endswith(b"\n") or len(piece) <= max_line_bytes
            if is_start:
                number += 1
                yield number, piece, is_whole
            is_start = is_whole


class _Lines:
    """The lines so far: their ids, and what they agreed on."""

    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self._seen: set[str] = set()
        self.num = 0
        self.model: str | None = None
        self.decoding: str | None = None

    def check(self, line: bytes) -> None:
        self.num += 1
        value = _parse(line)
        custom_id = _text(value, "custom_id")
        if custom_id in self._seen:
            raise _FaultError(
                "duplicate_custom_id", f"custom_id {_shown(custom_id)} occurs twice: make it unique", "custom_id"
            )
        self._seen.add(custom_id)
        if value.get("method", "POST") != "POST":
            raise _FaultError("invalid_method", f"method is {_shown(value['method'])}: only POST is served", "method")
        if _text(value, "url") != self._rules.endpoint:
            message = f"url is {_shown(value['url'])}, the endpoint is {self._rules.endpoint!r}: they must agree"
            raise _FaultError("invalid_url", message, "url")
        body = value.get("body")
        if not isinstance(body, dict):
            raise _FaultError("missing_required_parameter", "body is missing or not a JSON object", "body")
        self._check_model(body.get("model"))
        self._check_decoding(body.get("forq"))

    def _check_model(self, model: Any) -> None:
        rules = self._rules
        if model is None:
            model = rules.model or rules.default_model
        if not isinstance(model, str) or model not in rules.aliases:
            message = f"model {_shown(model)} does not exist; known models: {', '.join(rules.aliases)}"
            raise _FaultError("model_not_found", message, "body.model")
        agreed = rules.model or self.model
        if agreed is not None and model != agreed:
            message = f"model is {_shown(model)}, the batch's is {agreed!r}: a batch has one model"
            raise _FaultError("mismatched_model", message, "body.model")
        self.model = model

    def _check_decoding(self, forq: Any) -> None:
        said = forq.get("decoding") if isinstance(forq, dict) else None
        if not isinstance(said, str):  # what is wrong with any other value, its row says
            said = self._rules.decoding or "ar"
        agreed = self._rules.decoding or self.decoding or said
        if said != agreed:
            message = f"decoding is {_shown(said)}, the batch's is {agreed!r}: a batch has one decoding"
            raise _FaultError("mismatched_decoding", message, "body.forq.decoding")
        self.decoding = agreed


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _FaultError("invalid_json_line", f"the line is not JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise _FaultError("invalid_json_line", f"the line is a JSON {type(value).__name__}: write an object")
    return value


def _text(value: dict[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text:
        raise _FaultError("missing_required_parameter", f"{key} is missing or not a string", key)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise _FaultError("invalid_json_line", f"{key} holds half of a surrogate pair: write valid Unicode", key)
    if "\0" in text:  # no database keeps it: two ids could come back as one
        raise _FaultError("invalid_json_line", f"{key} holds a NUL character: leave it out", key)
    return text


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
