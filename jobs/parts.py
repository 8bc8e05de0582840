"""Which parts run on this machine: each writes one small file into `FORQ_HOME/run` and takes it away at its end."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from jobs import store
from jobs.child import leave_no_core
from jobs.settings import Settings


@contextlib.contextmanager
def registered(settings: Settings, role: str, pid: int | None = None, **facts: Any) -> Iterator[None]:
    """Say for the time of the block that process `pid` (this one, which then leaves no core dump) plays `role`."""
    if pid is None:
        leave_no_core()
    pid = pid if pid is not None else os.getpid()
    settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = settings.run_dir / f"{role}-{pid}.json"
    process = psutil.Process(pid)
    _write(path, {"role": role, "pid": pid, "since": process.create_time(), "parent": process.ppid(), **facts})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running(settings: Settings) -> list[dict[str, Any]]:
    """The parts whose process lives; files left by killed ones are removed."""
    found = []
    for path in sorted(settings.run_dir.glob("*-*.json")):
        try:
            part = json.loads(path.read_text())
            alive = is_alive(part)
        except (OSError, ValueError, KeyError, TypeError):
            alive = False
        if alive:
            found.append(part)
        else:
            path.unlink(missing_ok=True)
    return found


def is_alive(part: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(part["pid"])
        # A pid alone may be another process by now; pid and start time together are not. A zombie has ended: where
        # pid 1 is no real init, as in many containers, nobody ever takes it away.
        return bool(abs(process.create_time() - part["since"]) < 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def find(settings: Settings, role: str) -> dict[str, Any] | None:
    return next((part for part in running(settings) if part["role"] == role), None)


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = store.temporary_beside(path)
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
