"""A copy of the SQLite database while workers write to it.

The copy is of one moment: a read transaction holds that moment for the whole of it. Without it SQLite would begin again
whenever another process has written, and under load never end. Writers are not held up; their log beside the database
grows meanwhile.
"""

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

PAGES_PER_STEP = 4096
_TIMEOUT_S = 60.0

Progress = Callable[[int, int], None]
"""Called with the pages copied and the pages in all."""


@dataclass(frozen=True)
class Backup:
    path: Path
    num_bytes: int


def back_up(source: Path, target: Path, *, force: bool = False, progress: Progress | None = None) -> Backup:
    """Copy the database `source` to the file `target`, which appears whole and checked or not at all.

    Raises:
        FileExistsError: the target is there, and `force` does not allow to replace it.
        OSError: no database, too little space, or the copy fails its check; each with the file's name.
    """
    if not source.is_file():
        raise OSError(errno.ENOENT, "no database is there", str(source))
    if os.path.lexists(target) and (not force or not target.is_file() or target.samefile(source)):
        remedy = "name another file" if force else "--force replaces it"
        raise FileExistsError(errno.EEXIST, f"it exists already: {remedy}", str(target))
    # Hidden, and of this process: nobody takes it for a backup.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        _copy(source, temporary, progress or (lambda done, total: None))
        _publish(temporary, target, force)
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"the database cannot be copied ({error})", str(target)) from None
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)
    return Backup(target, target.stat().st_size)


def _copy(source: Path, temporary: Path, progress: Progress) -> None:
    with closing(sqlite3.connect(source, timeout=_TIMEOUT_S, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        (num_pages,) = reader.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = reader.execute("PRAGMA page_size").fetchone()
        reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # a transaction begins with its first look
        needed, free = num_pages * page_bytes, shutil.disk_usage(temporary.parent).free
        if free < needed:
            reason = f"the copy needs {needed:,} bytes, {free:,} are free: name another disk"
            raise OSError(errno.ENOSPC, reason, str(temporary.parent))
        with closing(sqlite3.connect(temporary, isolation_level=None)) as writer:
            # Nothing reads this file yet, and it is synced in the end: no journal, no sync per step.
            writer.execute("PRAGMA synchronous=OFF")
            reader.backup(
                writer, pages=PAGES_PER_STEP, progress=lambda status, left, total: progress(total - left, total)
            )
            # One file, without a log beside it; whoever opens it as forq's database makes it WAL again.
            writer.execute("PRAGMA journal_mode=DELETE")
            (verdict,) = writer.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise OSError(errno.EIO, f"the copy fails its integrity check ({verdict}): see `forq doctor`", str(source))


def _publish(temporary: Path, target: Path, force: bool) -> None:
    """Make the copy visible under its name, also after a power cut; without `force`, never over a file that came
    meanwhile."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    if force:
        temporary.replace(target)
    else:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "it exists already: --force replaces it", str(target)) from None
        except OSError:  # a file system without hard links
            temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
