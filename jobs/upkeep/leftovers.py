"""Files that nothing needs any more: submitted files of purged jobs, and what killed processes left half-written.

Nothing younger than `OLD_S` is touched. A submit stores its file before its job (jobs/submit.py), so a file without a
job may be one whose job is on its way; but whoever stores a file writes it anew, also where the same content lies there
already, so its time of the last write says when.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import ColumnElement, select, true

from db.clock import db_now
from db.models import File, Job
from db.session import Database
from jobs.confined import SOCKET_PREFIX, socket_folders
from jobs.remote.files import SCRATCH_PREFIX
from jobs.settings import Settings
from jobs.store import temporary_beside

OLD_S = 3600.0
SCRATCH_PREFIXES = ("forq-submit-", "forq-check-", SCRATCH_PREFIX)
"""Folders of jobs/submit.py and worker/check.py in the temporary folder, and of jobs/remote in `$FORQ_HOME/tmp`."""
_KEYS_PER_QUERY = 500
_STORED = re.compile(r"[0-9a-f]{64}\.[a-z]+")
"""A name that `store.keep` gave; any other file is somebody else's."""
_TEMPORARY = re.compile(r"\..+\.(\d{1,9})\.[0-9a-f]{8}\.tmp")
"""A name of `store.temporary_beside`, with the process that wrote it."""

_SOCKETS = re.compile(re.escape(SOCKET_PREFIX) + r"(\d{1,9})-.+")


@dataclass(frozen=True, slots=True)
class Left:
    """A file, or a folder with all that is in it."""

    path: Path
    num_bytes: int


def unnamed_files(
    database: Database,
    settings: Settings,
    stays: ColumnElement[bool] | None = None,
    *,
    even_without_jobs: bool = False,
) -> Iterator[Left]:
    """Stored files, older than `OLD_S`, that no job and no file of the API names; `stays` says which jobs count, by
    default all.

    None at all where the database has no job and no file: rather it is the wrong one, and these are those of another.
    """
    stays = true() if stays is None else stays
    oldest_s = time.time() - OLD_S
    if not even_without_jobs:
        with database.read() as connection:
            if all(connection.execute(select(table.id).limit(1)).first() is None for table in (Job, File)):
                return
    waiting: dict[str, Left] = {}
    for path in _entries(settings.data_dir):
        info = _info(path)
        if _STORED.fullmatch(path.name) and info and stat.S_ISREG(info.st_mode) and info.st_mtime < oldest_s:
            waiting[path.name] = Left(path, info.st_size)
        if len(waiting) == _KEYS_PER_QUERY:
            yield from _without_a_job(database, waiting, stays)
            waiting = {}
    yield from _without_a_job(database, waiting, stays)


def old_file(settings: Settings, key: str) -> Left | None:
    """A stored file, unless it was written within `OLD_S`, or is not on this machine."""
    path = settings.data_dir / key
    info = _info(path)
    if info is None or not stat.S_ISREG(info.st_mode) or info.st_mtime >= time.time() - OLD_S:
        return None
    return Left(path, info.st_size)


def missing_files(database: Database, settings: Settings) -> Iterator[str]:
    """Ids of the jobs whose submitted file is not in the store."""
    last = ""
    while True:
        statement = select(Job.id, Job.data_key).where(Job.id > last).order_by(Job.id).limit(_KEYS_PER_QUERY)
        with database.read() as connection:
            rows = connection.execute(statement).all()
        if not rows:
            return
        yield from (row.id for row in rows if not (settings.data_dir / row.data_key).is_file())
        last = rows[-1].id


def missing_openai_files(database: Database, settings: Settings) -> Iterator[str]:
    """Ids of the API's files that have not expired and whose content is not in the store."""
    last = ""
    while True:
        is_live = File.expires_at.is_(None) | (File.expires_at > db_now())
        statement = select(File.id, File.data_key).where(File.id > last, is_live).order_by(File.id)
        with database.read() as connection:
            rows = connection.execute(statement.limit(_KEYS_PER_QUERY)).all()
        if not rows:
            return
        yield from (row.id for row in rows if not (settings.data_dir / row.data_key).is_file())
        last = rows[-1].id


def remove_unnamed(left: Left) -> bool:
    """Delete a file of `unnamed_files`; False where a submit has stored the same content again meanwhile.

    Looked at again under a name of its own: between a look at the stored name and its removal, a submit could put a
    new file there.
    """
    aside = temporary_beside(left.path)
    try:
        left.path.rename(aside)
        if aside.stat().st_mtime >= time.time() - OLD_S:
            aside.rename(left.path)  # also over one stored yet again: a name is its content's hash
            return False
    except FileNotFoundError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def dead_temporaries(settings: Settings) -> Iterator[Left]:
    """Half-written files in the store, and scratch folders of submits, whose process is gone and that are older than
    `OLD_S`."""
    oldest_s = time.time() - OLD_S
    for folder in (settings.data_dir, settings.home / "tmp"):
        for path in _entries(folder):
            info, match = _info(path), _TEMPORARY.fullmatch(path.name)
            if not match or info is None or not stat.S_ISREG(info.st_mode) or info.st_mtime >= oldest_s:
                continue
            if not _may_still_write(int(match[1]), info.st_mtime):
                yield Left(path, info.st_size)
    yield from _dead_scratch(settings, oldest_s)
    yield from _dead_sockets(oldest_s)


def remove_temporary(left: Left) -> bool:
    if left.path.is_dir() and not left.path.is_symlink():
        shutil.rmtree(left.path, ignore_errors=True)
    else:
        left.path.unlink(missing_ok=True)
    return not os.path.lexists(left.path)


def _without_a_job(database: Database, files: dict[str, Left], stays: ColumnElement[bool]) -> Iterator[Left]:
    if not files:
        return
    with database.read() as connection:
        named = set(connection.scalars(select(Job.data_key).where(Job.data_key.in_(files), stays)))
        named |= set(connection.scalars(select(File.data_key).where(File.data_key.in_(files))))
    yield from (left for name, left in files.items() if name not in named)


def _dead_scratch(settings: Settings, oldest_s: float) -> Iterator[Left]:
    in_use: list[str] | None = None
    folders = {Path(tempfile.gettempdir()), settings.home / "tmp"}
    for path in (path for folder in sorted(folders) for path in _entries(folder)):
        info = _info(path)
        if not path.name.startswith(SCRATCH_PREFIXES) or info is None or not stat.S_ISDIR(info.st_mode):
            continue
        if info.st_uid != os.getuid():  # another user's process, of which nothing can be known
            continue
        inside = [found for file in path.rglob("*") if (found := _info(file)) is not None]
        if max(each.st_mtime for each in (info, *inside)) >= oldest_s:
            continue
        if in_use is None:
            in_use = _open_files()
        # Its name does not say whose it is. But a submit either wrote in it just now, or reads its spool there.
        if not any(name.startswith(f"{path}{os.sep}") for name in in_use):
            yield Left(path, sum(each.st_size for each in inside if stat.S_ISREG(each.st_mode)))


def _dead_sockets(oldest_s: float) -> Iterator[Left]:
    """Folders where readers' servers listened, whose process is gone."""
    for path in (path for folder in sorted(set(socket_folders())) for path in _entries(folder)):
        info, match = _info(path), _SOCKETS.fullmatch(path.name)
        if match is None or info is None or not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            continue
        if info.st_mtime < oldest_s and not _may_still_write(int(match[1]), info.st_mtime):
            yield Left(path, 0)


def _open_files() -> list[str]:
    names: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            names += [file.path for file in process.open_files()]
    return names


def _may_still_write(pid: int, written_at_s: float) -> bool:
    """Whether the process of a temporary file lives; one that began after the file's last write is another's."""
    try:
        began_s: float = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
    return began_s <= written_at_s + 1


def _entries(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            yield from (folder / entry.name for entry in entries)
    except FileNotFoundError:
        return


def _info(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None
