"""A folder holds one run: what it was told and what it read are noted there, and another run is refused."""

from dataclasses import fields
from typing import Any

from apar import files
from apar.errors import InputError
from apar.training.run_options import RunOptions, flag

_NOTE = "options.json"


def contents_of(options: RunOptions) -> dict[str, str]:
    """Digests of what a run reads, by the option that names it."""
    return {"base": files.digest(options.base / "config.json"), "data": files.digest(options.data)}


def refuse_another_run(options: RunOptions, contents: dict[str, str]) -> None:
    """
    Raises:
        InputError: the folder holds a run with other options, or of other contents.
    """
    before = files.read_json(options.out / _NOTE)
    if before is None:
        return
    difference = _first_difference(before["options"], options)
    for name, digest in contents.items():
        if difference is None and before["contents"].get(name) != digest:
            difference = f"--{name} holds something else than when the run began"
    if difference is not None:
        raise InputError(f"{options.out} holds a run with other options: {difference}; give the same, or another --out")


def claim(options: RunOptions, contents: dict[str, str]) -> None:
    """Note which run this folder holds."""
    path = options.out / _NOTE
    if files.read_json(path) is None:
        places = {"base": str(options.base), "data": str(options.data)}
        files.write_json(path, {"options": options.fingerprint(), "contents": contents, **places})


def _first_difference(before: dict[str, Any], options: RunOptions) -> str | None:
    """Which option is another one now. What `before` does not know yet had its default."""
    defaults = {field.name: field.default for field in fields(options)}
    for name, value in options.fingerprint().items():
        old = before.get(name, defaults[name])
        if old != value:
            return f"{flag(name)} was {old}, and is {value} now"
    return None
