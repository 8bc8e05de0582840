"""Keeps submitted files by content hash, so that an export finds the input columns untouched."""

import hashlib
import os
from pathlib import Path

from jobs.errors import BadInput, NotFound
from jobs.settings import Settings

_CHUNK_BYTES = 1 << 20

Version = tuple[int, int, int]
"""Inode, size in bytes, time of the last write in ns."""


def temporary_beside(target: Path) -> Path:
    """A name in the target's folder that no reader takes for a finished file."""
    return target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def publish(temporary: Path, target: Path) -> None:
    """Make a finished temporary file visible under its name, whole or not at all, also after a power cut."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def version_of(path: Path) -> Version:
    """What changes when a file is written again: inode, size and time of the last write.

    Raises:
        BadInput: if there is no such file.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}") from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def keep(settings: Settings, source: Path, suffix: str = ".parquet", *, version: Version | None = None) -> str:
    """Copy a file into the store and return its key; the same content is stored once.

    `version` is the `version_of` that was read and checked: other content must not be stored in its place.

    Raises:
        BadInput: if the file is no longer that version.
        OSError: the disk is full, or a folder cannot be written.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(settings.data_dir / "incoming")
    digest = hashlib.sha256()
    try:
        with source.open("rb") as reader, temporary.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
                writer.write(chunk)
        if version is not None and version_of(source) != version:
            raise BadInput(f"{source.name} was written to while it was read: submit it when it is complete")
        key = digest.hexdigest() + suffix
        publish(temporary, settings.data_dir / key)
    finally:
        temporary.unlink(missing_ok=True)
    return key


def locate(settings: Settings, key: str) -> Path:
    """Raises NotFound: if the store does not hold the key (another machine's FORQ_HOME, or purged)."""
    path = settings.data_dir / key
    if not path.is_file():
        raise NotFound(f"the submitted file {key[:12]}… is not in {settings.data_dir}: export where it was submitted")
    return path
