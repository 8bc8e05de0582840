"""What a submit may say beside its data; the service checks the values, and its message names the limit."""

from collections.abc import Sequence
from typing import TypedDict


class SubmitOptions(TypedDict, total=False):
    """Keyword arguments of `Client.submit`; what is left out, or None, is the service's default."""

    model: str | None
    """An alias of `Client.models`."""
    prompt_column: str | None
    messages_column: str | None
    template: str | None
    """Text of a Jinja template over the columns."""
    system: str | None
    """Text of a Jinja template of a system message."""
    turns: Sequence[str] | None
    """Texts of Jinja templates of the later turns."""
    id_column: str | None
    decoding: str | None
    """`ar`, or `apar`: the model forks its answers."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    n: int | None
    """Answers per row."""
    priority: int | None
    kv_share: float | None
    name: str | None
    webhook: str | None
    """A webhook of the tenant, by its URL, to hear of this job."""


def form_of(options: SubmitOptions) -> list[tuple[str, str]]:
    """The form's fields, in order.

    Raises:
        TypeError: an option that there is not.
    """
    unknown = sorted(set(options) - set(SubmitOptions.__annotations__))
    if unknown:
        raise TypeError(f"submit() got an unexpected keyword argument {unknown[0]!r}")
    form: list[tuple[str, str]] = []
    for name, value in options.items():
        if isinstance(value, str):
            form.append((name, value))
        elif isinstance(value, int | float):
            form.append((name, repr(value)))
        elif isinstance(value, Sequence):
            form += [("turn", str(turn)) for turn in value]
        elif value is not None:
            raise TypeError(f"submit(): {name} is a {type(value).__name__}: give text or a number")
    return form
