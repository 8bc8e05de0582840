"""Rows with several turns: a later turn's template, and the conversation that a row's answers make of it.

A row's payload holds `messages`, the conversation up to the first question, and `turns`, the later ones in order: text,
or a list of texts and numbers where number i stands for answer i. Answers are put in when they are known, as they are:
nothing that a model writes is ever read as a template.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes

from jobs.errors import BadInput
from jobs.messages import RowError
from jobs.templates import compile_template, parse_template

ANSWERS = "answers"
"""What a later turn's template calls the answers before it."""
MAX_TURNS = 32

Turn = str | list[str | int]
"""A question as it is stored: text, or texts and numbers of earlier answers."""

_CAPTURING = (nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock, nodes.Block)
"""What makes a value of its printed text, which filters could then change."""


class TurnTemplate:
    """The template of a later turn, over the file's columns; it may print the answers before it."""

    def __init__(self, source: str, columns: list[str], number: int) -> None:
        """Compile the template of turn `number`, from 2, which has `number - 1` answers before it.

        Raises:
            BadInput: it does not parse, uses a name that is no column, or does more with an answer than print it.
        """
        self._what = f"the template of turn {number}"
        printed = _check_answers(source, columns, number, self._what)
        own = {} if not printed else {ANSWERS: [_mark() for _ in range(number - 1)]}
        self._marks: list[str] = own.get(ANSWERS, [])
        self._own = own
        self._template = compile_template(source, [*columns, *own], self._what)

    def render(self, row: dict[str, Any]) -> Turn:
        """
        Raises:
            RowError: nothing is printed, not even an answer.
            Exception: whatever a filter or operator of the template raises.
        """
        parts: list[str | int] = []
        rest = self._template.render({**row, **self._own})
        if not rest.strip():
            raise RowError("empty_prompt", f"{self._what} prints nothing on this row: a turn needs text")
        while (found := self._first_mark(rest)) is not None:
            start, number = found
            parts += [rest[:start], number]
            rest = rest[start + len(self._marks[number]) :]
        return [part for part in [*parts, rest] if part != ""] if parts else rest

    def _first_mark(self, text: str) -> tuple[int, int] | None:
        found = [(start, number) for number, mark in enumerate(self._marks) if (start := text.find(mark)) >= 0]
        return min(found, default=None)


def conversation(payload: dict[str, Any], answers: Sequence[str]) -> list[dict[str, str]]:
    """The messages up to the question after these answers; up to the last answer where no question is left."""
    messages = payload.get("messages") or [{"role": "user", "content": payload["prompt"]}]
    found = list(messages)
    turns: list[Turn] = payload.get("turns", [])
    for number, answer in enumerate(answers):
        found.append({"role": "assistant", "content": answer})
        if number < len(turns):
            found.append({"role": "user", "content": _filled(turns[number], answers)})
    return found


def num_turns(payload: dict[str, Any]) -> int:
    """Questions of a row, the first one included."""
    return 1 + len(payload.get("turns", ()))


def _filled(turn: Turn, answers: Sequence[str]) -> str:
    if isinstance(turn, str):
        return turn
    return "".join(answers[part] if isinstance(part, int) else part for part in turn)


def _mark() -> str:
    """Stands for an answer while a row is rendered: nobody who wrote a cell can have guessed it."""
    return f"\ue000{secrets.token_hex(16)}\ue001"


def _check_answers(source: str, columns: list[str], number: int, what: str) -> bool:
    """Tell whether the template prints earlier answers; see that it does nothing else with them.

    An answer is not there yet when the template runs. A filter, a test or a slice of it would see what stands in its
    place, so only the plain `{{ answers[0] }}` is let through.
    """
    tree = parse_template(source, what)
    names = [name for name in tree.find_all(nodes.Name) if name.name == ANSWERS]
    if not names:
        return False
    if ANSWERS in columns:
        raise BadInput(f"{what} uses {ANSWERS}, which is also a column of the file: rename the column")
    printed = {id(name) for name in _printed_answers(tree, number, what)}
    captured = {id(name) for block in _capturing(tree) for name in block.find_all(nodes.Name)}
    for name in names:
        if id(name) not in printed or id(name) in captured:
            raise BadInput(
                f"{what}, line {name.lineno}: an answer can only be printed as it is, as {{{{ {ANSWERS}[0] }}}}, "
                "outside macros, blocks and filters: it is not known yet when the template runs"
            )
    return True


def _printed_answers(tree: nodes.Template, number: int, what: str) -> Iterator[nodes.Name]:
    for output in tree.find_all(nodes.Output):
        for node in output.nodes:
            if not (isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name)):
                continue
            try:
                index = node.arg.as_const()
            except nodes.Impossible:
                continue
            if node.node.name != ANSWERS or type(index) is not int:
                continue
            if not -(number - 1) <= index < number - 1:
                raise BadInput(
                    f"{what} prints {ANSWERS}[{index}]: {number - 1} answer(s) come before it, "
                    f"{ANSWERS}[0] to {ANSWERS}[{number - 2}]"
                )
            yield node.node


def _capturing(tree: nodes.Template) -> Iterator[nodes.Node]:
    yield from tree.find_all(_CAPTURING)
    yield from (loop for loop in tree.find_all(nodes.For) if loop.recursive)  # loop() gives its text as a value
