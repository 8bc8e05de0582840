"""Temporary files of the API, under FORQ_HOME: uploads and exports may be larger than what /tmp can hold."""

import shutil
import time
from pathlib import Path

from jobs.settings import Settings

PREFIX = "api-"
LEFT_BEHIND_S = 24 * 3600.0


def scratch_dir(settings: Settings) -> Path:
    return settings.home / "tmp"


def prepare(settings: Settings) -> None:
    """Make the folder, and clear what a process that was killed a day or more ago left in it."""
    folder = scratch_dir(settings)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    oldest = time.time() - LEFT_BEHIND_S
    for path in folder.glob(f"{PREFIX}*"):
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # another API process cleared it
