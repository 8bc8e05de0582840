"""Checkpoints of a run: everything the next step depends on, in a folder per step, the two newest kept.

The optimizer's state, the trained weights and the random state go in; the data's position is the step itself. A folder
appears under its name only when it is whole and on the disk, so that a crash while writing leaves the one before.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from apar.files import write_folder

KEPT = 2
_FILE = "state.pt"


def save(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write the state behind `step` steps, then drop older ones.

    Args:
        state: tensors, numbers, texts, and mappings and lists of them.
    """
    write_folder(folder / f"step-{step:08d}", lambda new: torch.save(dict(state), new / _FILE))
    for old in _found(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and state of the newest checkpoint that can be read, or None."""
    for path in reversed(_found(folder)):
        try:
            state = torch.load(path / _FILE, map_location="cpu", weights_only=True)
        except Exception:  # noqa: S112  # torn by something other than us: the one before will do
            continue
        return int(path.name.removeprefix("step-")), state
    return None


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())
