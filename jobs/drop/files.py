"""What a dropped file is, before anyone trusts it: its name, its kind, its writers, its end."""

import errno
import json
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import store
from jobs.faults import printable
from jobs.source import JSONL_SUFFIXES, PARQUET_SUFFIXES, first_line, is_jsonl

DATA_SUFFIXES = PARQUET_SUFFIXES + JSONL_SUFFIXES
JOB_SUFFIX = ".job.toml"
UNFINISHED_SUFFIXES = (".tmp", ".part", ".crdownload")
"""Names under which browsers and copying tools write what they rename at the end."""
MAX_NAME_BYTES = 200
"""File systems allow 255; the rest is for `<job_id>-`, `.reason.txt` and the temporary names."""
_TAIL_BYTES = 4 << 20

Signature = tuple[int, int, int, int]
"""Device, inode, size, mtime in ns: whoever writes or replaces a file changes one of them."""


def signature(info: os.stat_result) -> Signature:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def is_data_name(name: str) -> bool:
    """Whether a name claims to be input: all but hidden ones, unfinished ones and job.toml files.

    Of these, what forq cannot read is refused with a reason, not passed over.
    """
    return not name.startswith(".") and not name.lower().endswith((*UNFINISHED_SUFFIXES, JOB_SUFFIX))


def shown(name: str) -> str:
    """A name that is safe to print, to log and to give to a file: controls replaced, not too long."""
    clean = printable(name, "_")
    if len(clean.encode()) <= MAX_NAME_BYTES:
        return clean
    suffix = PurePath(clean).suffix
    suffix = suffix if len(suffix.encode()) < 20 else ""
    return clean.encode()[: MAX_NAME_BYTES - len(suffix.encode())].decode(errors="ignore") + suffix


def name_fault(name: str) -> str | None:
    if printable(name, "") != name:
        return "the name has line breaks, control characters or bytes that are not UTF-8: rename the file"
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        return f"the name has {size} bytes, the limit is {MAX_NAME_BYTES}: shorten it"
    return None


def kind_fault(info: os.stat_result) -> str | None:
    """Why this is no file of its own; hard links apart, which are made and unmade while a file is placed."""
    if stat.S_ISLNK(info.st_mode):
        return "it is a symbolic link, which is never followed: copy the file itself into the inbox"
    if not stat.S_ISREG(info.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(info.st_mode), "a device")
        return f"it is {kind}, not a regular file: copy a file into the inbox"
    return None


def hard_link_fault(info: os.stat_result) -> str | None:
    if info.st_nlink > 1:
        return f"it has {info.st_nlink} names (hard links), the limit is 1: copy the file into the inbox instead"
    return None


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the path itself: never through a link, and never waiting for the other end of a FIFO.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_being_written(descriptor: int) -> bool:
    """Whether the kernel knows of an open writer: a hint, so False wherever it cannot tell (NFS, another's file)."""
    try:
        import fcntl

        # A read lease is granted only while nobody has the file open for writing. Whoever opens it in the moment the
        # lease is held makes the kernel signal us: SIGURG, which is ignored, and not SIGIO, which would kill.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    except (ImportError, AttributeError):
        return False
    return False


def unreadable(descriptor: int, name: str) -> str | None:
    """Why a file looks cut off; None when its end is there. What else may be wrong with it, submit says.

    Reads through the descriptor, not the path, which may be exchanged meanwhile.
    """
    suffix = PurePath(printable(name, "")).suffix
    if suffix.lower() not in DATA_SUFFIXES:
        return f"its suffix is {suffix!r}: forq reads {', '.join(DATA_SUFFIXES)}"
    size = os.fstat(descriptor).st_size
    if size == 0:
        return "it is empty (0 bytes): write it again"
    if is_jsonl(Path(name)):
        return _jsonl_end_fault(descriptor, size)
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20).close()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return f"it is not a readable Parquet file ({first_line(error)}): write it again"
    return None


def _jsonl_end_fault(descriptor: int, size: int) -> str | None:
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    _, newline, last = tail.rpartition(b"\n")
    if not last.strip() or (not newline and size > _TAIL_BYTES):
        return None
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return f"its last line ({len(last)} bytes) has no end and is not JSON: write it again, to the end"
    return None


def move(source: Path, target: Path) -> None:
    """Rename; where the folders are on different file systems (container volumes), copy whole or not at all."""
    try:
        source.rename(target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    info = source.lstat()
    if stat.S_ISREG(info.st_mode):
        temporary = store.temporary_beside(target)
        try:
            shutil.copyfile(source, temporary, follow_symlinks=False)
            store.publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    elif stat.S_ISLNK(info.st_mode):
        target.symlink_to(source.readlink())
    source.unlink()


def free_name(folder: Path, name: str) -> Path:
    """`folder/name`, or with `-2`, `-3` … before the suffix when that is taken."""
    path, number = folder / name, 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{PurePath(name).stem}-{number}{PurePath(name).suffix}"
    return path


def write_text(target: Path, text: str) -> None:
    """Write a small file, which appears whole or not at all."""
    temporary = store.temporary_beside(target)
    try:
        temporary.write_text(text, encoding="utf-8")
        store.publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
