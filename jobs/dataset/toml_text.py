"""Writes plain data as TOML; the standard library only reads it."""

import json
import re
from typing import Any

_UNQUOTED = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(values: dict[str, Any]) -> str:
    """TOML of a dict whose keys are text; tables come last, and what is None is left out."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not _is_none_or_table(value)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_value(item)}" for name, item in value.items() if item is not None]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_none_or_table(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _key(name: str) -> str:
    return name if _UNQUOTED.fullmatch(name) else _quoted(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _long(value) if "\n" in value else _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(_value(item) for item in value) + "]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _long(text: str) -> str:
    """Over several lines, as a template is written; the first newline belongs to the quotes."""
    inner = _quoted(text)[1:-1]
    # json escapes what TOML escapes; of that, newlines and quotes may stand as they are, three quotes may not.
    inner = re.sub(r"\\(.)", lambda found: {"n": "\n", '"': '"'}.get(found[1], found[0]), inner)
    return '"""\n' + re.sub(r'"(?="|$)', '\\\\"', inner) + '"""'
