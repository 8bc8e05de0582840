"""The SQLite file's size: what is free inside it, and giving that back to the disk."""

import os
import shutil
import sqlite3
from pathlib import Path

from db.session import SQLITE_BUSY_TIMEOUT_S, Database
from jobs.errors import BadInput, Unavailable


def free_bytes(database: Database) -> int:
    """Bytes of the file that hold nothing; new rows take them before the file grows."""
    with database.read() as connection:
        free, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_size")
        )
    return int(free) * int(size)


def check_backend(database: Database) -> None:
    """Raises BadInput: the database is no SQLite file."""
    if not database.is_sqlite:
        raise BadInput("--vacuum is for SQLite; PostgreSQL frees the space itself, `VACUUM FULL` gives it to the disk")


def vacuum(database: Database) -> int:
    """Write the SQLite file anew without its free space; returns the bytes that the disk got back.

    Readers go on meanwhile, writers wait.

    Raises:
        Unavailable: too little free disk, or another process held the database too long; nothing has changed.
    """
    path = Path(database.url.database or "").absolute()
    _check_disk(database, path.parent)
    before = path.stat().st_size
    connection = sqlite3.connect(path, timeout=SQLITE_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("VACUUM")
        # The new pages are in the log still; the file shrinks when they are taken over.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.OperationalError as error:
        raise Unavailable(f"the file was not shrunk ({error}): try --vacuum again when no job runs") from None
    finally:
        connection.close()
    return before - path.stat().st_size


def _check_disk(database: Database, folder: Path) -> None:
    """SQLite writes a copy of what is used into its temporary folder, and then, in WAL mode, all of it into the log
    beside the file."""
    with database.read() as connection:
        pages, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size")
        )
    used_bytes = int(pages) * int(size) - free_bytes(database)
    needed: dict[int, tuple[Path, int]] = {}
    for place in (folder, _temporary_folder()):
        device = place.stat().st_dev
        needed[device] = (place, needed.get(device, (place, 0))[1] + used_bytes)
    for place, num_bytes in needed.values():
        free = shutil.disk_usage(place).free
        if free < num_bytes:
            raise Unavailable(
                f"--vacuum needs {num_bytes:,} bytes in {place}, {free:,} are free: make room, or leave it out "
                "(new rows use the freed space again)"
            )


def _temporary_folder() -> Path:
    """Where SQLite puts its temporary files, see sqlite.org/tempfiles.html section 5."""
    named = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")  # noqa: S108
    for name in named:
        if name and Path(name).is_dir() and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path.cwd()
