"""The folder of a judging, which remembers how far it came; a killed command leaves nothing that stops the next one."""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ulid import ULID

from jobs import store
from jobs.errors import BadInput

STATE_FILE, PROMPTS_FILE = "judge.json", "prompts.parquet"
RESULTS_FILE, REPORT_FILE, PLOT_FILE = "results.parquet", "report.json", "report.png"
STATE_VERSION = 2
_OURS = "|".join(map(re.escape, (STATE_FILE, PROMPTS_FILE, RESULTS_FILE, REPORT_FILE, PLOT_FILE)))
_TEMPORARY = re.compile(rf"\.(?:{_OURS})\.(\d{{1,9}})\.[0-9a-f]{{8}}\.tmp")
"""A name of `store.temporary_beside` for a file of ours, with the process that wrote it."""


@dataclass
class State:
    """`judge.json`."""

    run_id: str
    fingerprint: str
    jobs: dict[str, str] = field(default_factory=dict)
    version: int = STATE_VERSION


def open_folder(folder: Path, fingerprint: str) -> State:
    """The state of a judging, of a new one where there is none. Raises BadInput: the folder is not this judging's."""
    file = folder / STATE_FILE
    if not file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise BadInput(f"{folder} is a file: name a folder with --out") from None
        _clear_temporaries(folder)
        if any(not _TEMPORARY.fullmatch(entry.name) for entry in folder.iterdir()):
            raise BadInput(f"{folder} is not empty and holds no judging: name another folder with --out")
        state = State(str(ULID()), fingerprint)
        save_state(state, folder)
        return state
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        state = State(read["run_id"], read["fingerprint"], dict(read["jobs"]), read["version"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{file} is damaged: remove {folder}, or name another folder with --out") from None
    if state.version != STATE_VERSION or state.fingerprint != fingerprint:
        raise BadInput(
            f"{folder} holds a judging of another file or with other options: name another folder with --out, or "
            "remove it"
        )
    _clear_temporaries(folder)
    return state


def _clear_temporaries(folder: Path) -> None:
    """Remove what a killed command was writing; in a container it may have had the number that we have."""
    for entry in folder.iterdir():
        found = _TEMPORARY.fullmatch(entry.name)
        if found is not None and (int(found[1]) == os.getpid() or not psutil.pid_exists(int(found[1]))):
            entry.unlink(missing_ok=True)


def save_state(state: State, folder: Path) -> None:
    write_json(asdict(state), folder / STATE_FILE)


def write_json(value: Any, path: Path) -> None:
    temporary = store.temporary_beside(path)
    try:
        temporary.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        store.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def copy_into(source: Path, target: Path) -> None:
    temporary = store.temporary_beside(target)
    try:
        shutil.copyfile(source, temporary)
        store.publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
