"""What a submit may say beside its data; the service checks the values, and its message names the limit."""

from collections.abc import Sequence
from numbers import Integral, Real
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
        TypeError: an option that there is not, or of another type.
    """
    unknown = sorted(set(options) - set(SubmitOptions.__annotations__))
    if unknown:
        raise TypeError(f"submit() got an unexpected keyword argument {unknown[0]!r}")
    form: list[tuple[str, str]] = []
    for name, value in options.items():
        if value is None:
            continue
        if name == "turns":
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"submit(): turns is a {type(value).__name__}: give a list of texts")
            form += [("turn", str(turn)) for turn in value]
        elif isinstance(value, str):
            form.append((name, value))
        elif isinstance(value, Integral):  # numpy's too
            form.append((name, str(int(value))))
        elif isinstance(value, Real):
            form.append((name, repr(float(value))))
        else:
            raise TypeError(f"submit(): {name} is a {type(value).__name__}: give text or a number")
    return form
