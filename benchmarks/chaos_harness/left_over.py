"""What a run leaves on the machine: processes, registrations, temporary files.

A process that is killed in the middle of an upload or a submit cannot take its scratch files with it. The service
clears them later, by age; so these are aged here, its own clearing is called, and only what it leaves counts.
"""

import os
import tempfile
import time
from pathlib import Path

from api import scratch
from benchmarks.chaos_harness.system import System
from db.session import Database
from jobs import parts
from jobs.settings import Settings

AGED_S = 3 * 24 * 3600
ENGINES_OWN = ("vllm_dist_", "torchinductor_")
"""Of vLLM and torch, in the temporary folder: a killed engine leaves them, and no name says whose they are."""
LASTING = {"up.lock"}
"""In FORQ_HOME/run: the file that is locked by whoever is `up`."""


def left_over(system: System, database: Database) -> tuple[list[str], int]:
    """What is left although nothing runs; and how many temporary files only the clearing by age took away."""
    settings = system.settings
    left = [f"process {process.pid} {' '.join(process.cmdline())[:80]}" for process in system.processes()]
    before = _temporaries(settings)
    for path in before:
        _age(path)
    _clear(database, settings)
    after = _temporaries(settings)
    left += [f"file {path}" for path in (*after, *_run_files(settings), *_claimed(settings))]
    return left, len(before) - len(after)


def _temporaries(settings: Settings) -> list[Path]:
    places = [settings.data_dir, settings.home / "tmp", settings.home / "outbox", settings.home / "accepted"]
    found = [path for place in places if place.is_dir() for path in place.iterdir() if _is_temporary(path)]
    return [*found, *(path for path in Path(tempfile.gettempdir()).iterdir() if not path.name.startswith(ENGINES_OWN))]


def _is_temporary(path: Path) -> bool:
    return path.parent.name == "tmp" or path.name.endswith(".tmp")


def _run_files(settings: Settings) -> list[Path]:
    parts.running(settings)  # takes the registrations of killed processes away, as every `ps`, `up` and `down` does
    return [path for path in settings.run_dir.iterdir() if path.name not in LASTING]


def _claimed(settings: Settings) -> list[Path]:
    """Dropped files that a watcher has taken and not dealt with."""
    claims = settings.home / "inbox" / ".claimed"
    files = [path for path in (settings.home / "inbox").iterdir() if path.is_file()]
    return files + ([path for path in claims.iterdir() if path.is_dir()] if claims.is_dir() else [])


def _age(path: Path) -> None:
    then = time.time() - AGED_S
    for file in [*path.rglob("*"), path]:
        os.utime(file, (then, then), follow_symlinks=False)


def _clear(database: Database, settings: Settings) -> None:
    """What the next start of the API and `forq doctor --repair` do."""
    from jobs.upkeep.leftovers import dead_temporaries, remove_temporary

    scratch.prepare(settings)
    for left in list(dead_temporaries(settings)):
        remove_temporary(left)
