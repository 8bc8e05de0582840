"""What a bootstrap run is about and how far it got: `bootstrap.json` in its folder, written anew after each stage."""

import json
from pathlib import Path
from typing import Any

from jobs import store
from jobs.errors import BadInput

NAME = "bootstrap.json"
FILES = frozenset({"prompts", "answers", "report_prompts"})
"""Options that are files, kept as digests of their contents."""


class Record:
    """The stages that are done, with what each found; a run with other options is refused."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """Open the folder's record, or begin one.

        Raises:
            BadInput: the folder holds a run with other options, or something else.
        """
        self.folder = folder
        self._path = folder / NAME
        if self._path.exists():
            self._value = _read(self._path)
            differing = [key for key in options if self._value["options"].get(key) != options[key]]
            if differing:
                key = differing[0]
                what = f"{key} = {self._value['options'].get(key)!r}, now it is {options[key]!r}"
                if key in FILES:  # a digest says nothing to a reader
                    what = f"other contents of --{key.replace('_', '-')}"
                raise BadInput(f"{folder} holds a run with {what}: give the same options to go on, or another --out")
            return
        if folder.exists() and any(folder.iterdir()):
            raise BadInput(f"{folder} is not empty and holds no {NAME}: give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._value = {"options": options, "stages": {}}
        self._write()

    def stage(self, name: str) -> dict[str, Any] | None:
        """What a stage found, once it is done."""
        found: dict[str, Any] | None = self._value["stages"].get(name)
        return found

    def finish(self, name: str, **facts: Any) -> dict[str, Any]:
        self._value["stages"][name] = facts
        self._write()
        return facts

    def _write(self) -> None:
        temporary = store.temporary_beside(self._path)
        temporary.write_text(json.dumps(self._value, indent=1, ensure_ascii=False) + "\n", "utf-8")
        store.publish(temporary, self._path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
        if isinstance(value["options"], dict) and isinstance(value["stages"], dict):
            return dict(value)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{path} cannot be read: remove it and its folder to begin anew")
