"""Refusals as one line: names and values of a user short, and printable; what pydantic found wrong with them."""

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

MAX_NAME_CHARS, MAX_VALUE_CHARS, MAX_NAMES = 60, 40, 20
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})  # controls, bytes that are not UTF-8, line separators


def one_line(text: str) -> str:
    return " ".join(printable(text, " ").split())


def printable(text: str, instead: str) -> str:
    """`text` with `instead` for each character that would break a line or steer a terminal."""
    return "".join(instead if unicodedata.category(char) in _UNSAFE_CATEGORIES else char for char in text)


def shown_name(parts: Iterable[object]) -> str:
    """Where a value stands, as `a.b`; whoever wrote it may have written anything."""
    name = ".".join(map(str, parts))
    if len(name) > MAX_NAME_CHARS:
        name = name[: MAX_NAME_CHARS - 3] + "..."
    return name if name.isprintable() else repr(name)[1:-1]


def shown_names(names: Sequence[str]) -> str:
    """Of a file's columns, or what a template uses: the first ones, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(shown_name([name]) for name in names[:MAX_NAMES]) + more


def no_column(file: str, name: str, there: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, there, n=1)
    hint = f"; did you mean '{shown_name(near)}'?" if near else "."
    return f"{file} has no column '{shown_name([name])}'{hint} Its columns: {shown_names(there)}"


def shown_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def unknown_key(name: str, known: Sequence[str]) -> str:
    """`name` is shown; its last part is compared with the keys there are."""
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"'{name}' is not a known key{hint}: use {', '.join(known)}"


def should_be(fault: Any) -> str:
    """What is asked for, in pydantic's words; a bound as the whole number that it is, which pydantic rounds."""
    bound = {"less_than": "lt", "less_than_equal": "le"}.get(fault["type"])
    if bound is not None and isinstance(fault["ctx"][bound], int):
        return f"less than {'' if bound == 'lt' else 'or equal to '}{fault['ctx'][bound]}"
    return str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
