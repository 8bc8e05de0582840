"""Prompt templates: Jinja in its sandbox, over a file's columns."""

from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jobs.errors import BadInput
from jobs.faults import shown_names
from jobs.source import first_line

MAX_TEMPLATE_CHARS = 1 << 20
MAX_POWER, MAX_REPEATED = 1000, 1 << 20
_NOT_PARSED = (TemplateError, SyntaxError, RecursionError, ValueError, OverflowError)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses the operators that make a huge value of a short text: `'a' * 10**10`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "**" and not (abs(left) <= MAX_POWER and abs(right) <= MAX_POWER):
            raise SecurityError(f"a power of numbers beyond {MAX_POWER} is refused")
        if operator == "*" and sizes != [left, right] and sizes[0] * sizes[1] > MAX_REPEATED:
            raise SecurityError(f"a repetition to {sizes[0] * sizes[1]} items is refused, the limit is {MAX_REPEATED}")
        return super().call_binop(context, operator, left, right)


def _no_null(value: Any) -> Any:
    """A null would be written into the prompt as the word None, and be answered."""
    if value is None:
        raise ValueError("a value it prints is null; where that is meant, write {{ column or '' }}")
    return value


def parse_template(source: str, what: str = "the template") -> nodes.Template:
    """Raises BadInput: it does not parse, or is too long."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise BadInput(f"{what} has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")
    try:
        return _environment().parse(source)
    except _NOT_PARSED as error:
        raise BadInput(f"{what} does not parse: {first_line(error)}") from None


def compile_template(source: str, columns: list[str], what: str = "the template") -> Template:
    """Raises BadInput: it does not parse, is too long, or uses a column the file does not have."""
    tree = parse_template(source, what)
    environment = _environment()
    try:
        unknown = sorted(meta.find_undeclared_variables(tree) - {*columns, *environment.globals})
        template = environment.from_string(source)
    except _NOT_PARSED as error:
        raise BadInput(f"{what} does not parse: {first_line(error)}") from None
    if unknown:
        raise BadInput(f"{what} uses {shown_names(unknown)}; the file's columns are {shown_names(columns)}")
    return template


def _environment() -> _Sandbox:
    return _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_no_null)
