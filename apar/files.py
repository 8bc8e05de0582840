"""Files and folders that are there whole or not at all: written beside, synced, renamed into place."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL_BYTES = 1 << 20
"""A disk with less free is full."""


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder that no crash leaves half written; what stood there before goes.

    Raises:
        OSError: also for a full disk that torch or safetensors met, who say it in words of their own.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.new-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    new = folder.with_name(f"{prefix}{os.getpid()}")
    new.mkdir()
    try:
        fill(new)
        put_in_place(new, folder)
    except OSError:
        raise
    except Exception as error:
        if shutil.disk_usage(new).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Put a finished folder on the disk for good, readable by all, and rename it to `folder` beside it."""
    for path in sorted(new.rglob("*")):
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o444)  # safetensors writes 0600; a worker may run as another user
        sync(path)
    sync(new)
    if folder.exists():
        # A folder cannot replace a full one in one step: for a moment there is none.
        old = new.with_name(new.name + "-old")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(folder)
    sync(folder.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write; what is there when the block ends without an error becomes `path`, in one step.

    Raises:
        OSError: nothing can be written beside `path`; before the block is entered.
    """
    new = path.with_name(f".{path.name}.new-{os.getpid()}")
    new.touch()  # said in the system's own words, which libraries wrap in theirs
    try:
        yield new
        sync(new)
        new.replace(path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_file(path: Path, content: str) -> None:
    """Replace a file in one step."""
    with replacing(path) as new:
        new.write_text(content, "utf-8")


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The file's value, or None where there is no such file or no JSON in it."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def digest(path: Path) -> str:
    """SHA-256 of a file's content, or of nothing where there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
