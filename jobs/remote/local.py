"""`file://`: files of this machine under a root's folder, with no way out of it.

Where a symbolic link leads is looked at first, and must stay inside. Then the path is opened folder by folder without
following links, so that a link put there in between opens nothing.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from jobs.errors import BadInput, Unavailable
from jobs.remote.urls import Url

FileId = tuple[int, int, int]
"""Inode, size in bytes, time of the last write in ns."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_input(url: Url, root: Url) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        BadInput: not there, no regular file, behind a link out of the root, not readable.
    """
    folder, name = _open_parent(url, root, follow_last=True)
    try:
        # Non-blocking: to open a FIFO would wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise BadInput(_trouble(url, error)) from None
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(f"{url}: not a regular file")
    with open(descriptor, "rb", buffering=0) as file:
        yield file


def identity(file: BinaryIO) -> FileId:
    info = os.fstat(file.fileno())
    return info.st_ino, info.st_size, info.st_mtime_ns


def publish(url: Url, root: Url, chunks: Iterator[bytes]) -> None:
    """Write `chunks` to a file without a name, then give it the target's: whole or not at all, also when killed.

    Raises:
        BadInput: the folder is not there or outside of the root, or the target is a folder.
        Unavailable: it cannot be written, or the disk is full.
    """
    folder, name = _open_parent(url, root, follow_last=False)
    temporary = f".forq.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    try:
        try:
            descriptor, is_named = _open_output(folder, temporary)
            with open(descriptor, "wb", buffering=0) as file:
                for chunk in chunks:
                    view = memoryview(chunk)
                    while view:  # an unbuffered write may take less
                        view = view[file.write(view) :]
                os.fsync(descriptor)
                if not is_named:  # a link replaces nothing, a rename does
                    os.link(f"/proc/self/fd/{descriptor}", temporary, dst_dir_fd=folder, follow_symlinks=True)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except IsADirectoryError:
            raise BadInput(f"{url} is a folder: name a file") from None
        except OSError as error:
            raise Unavailable(f"{url}: cannot be written ({error.strerror or error}): check space and rights") from None
        finally:
            with suppress(OSError):  # renamed, or never made
                os.unlink(temporary, dir_fd=folder)
    finally:
        os.close(folder)


def _open_output(folder: int, temporary: str) -> tuple[int, bool]:
    """A new file in an open folder, and whether it has a name: on file systems that know no file without (NFS)."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=folder), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(temporary, flags, 0o644, dir_fd=folder), True


def _open_parent(url: Url, root: Url, *, follow_last: bool) -> tuple[int, str]:
    """The open folder of a file, and the file's name in it; with `follow_last`, of what the name links to."""
    base = os.path.realpath(f"/{root.key}")
    wanted = f"/{url.key}"
    parent, name = os.path.split(os.path.realpath(wanted) if follow_last else wanted)
    path = os.path.join(os.path.realpath(parent), name)
    if os.path.commonpath([base, path]) != base or path == base:
        raise BadInput(f"{url} leads out of its root by a symbolic link: name the file where it lies")
    *folders, name = os.path.relpath(path, base).split(os.sep)
    try:
        folder = os.open(base, _FOLDER)
        for part in folders:
            try:
                inner = os.open(part, _FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
    except FileNotFoundError:
        raise BadInput(f"{url}: there is no folder {os.path.dirname(path)}: make it, or correct the URL") from None
    except OSError as error:
        raise BadInput(_trouble(url, error)) from None
    return folder, name


def _trouble(url: Url, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{url}: no such file"
    return f"{url}: cannot be opened ({error.strerror or error}): check the path and its rights"
