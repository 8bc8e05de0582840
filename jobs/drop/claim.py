"""The claim folder `inbox/.claimed/`: one private folder per file taken, so that the file is nobody else's any more."""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs.drop.files import JOB_SUFFIX, Signature, free_name, move, shown, signature, write_text
from jobs.errors import Unavailable
from jobs.faults import one_line

_TRIES, _REASON, _LOCK = ".tries", ".reason", ".lock"


@dataclass(frozen=True)
class Claim:
    """A file taken from the inbox and its job.toml, in a folder of their own under their own names."""

    folder: Path
    data: Path | None
    toml: Path | None
    is_toml_copied: bool = False

    @property
    def id(self) -> str:
        return self.folder.name

    @classmethod
    def take(cls, folder: Path, data: Path, toml: Path | None, copy_toml: bool) -> "Claim":
        """Move a file from the inbox into a new claim folder.

        The job.toml goes first: killed in between, a claim without a data file is undone, while a data file without its
        job.toml would run with the defaults. It is copied where another file still needs it.

        Raises:
            OSError: one of them is not there any more, or cannot be moved.
        """
        folder.mkdir(mode=0o700)
        if toml is not None:
            if copy_toml:
                shutil.copy2(toml, folder / toml.name, follow_symlinks=False)
            else:
                toml.rename(folder / toml.name)
        data.rename(folder / data.name)
        return cls(folder, folder / data.name, folder / toml.name if toml is not None else None, copy_toml)

    def signatures(self) -> tuple[Signature, ...]:
        return tuple(signature(path.lstat()) for path in (self.data, self.toml) if path is not None)

    def holds(self, judged: tuple[Signature, ...]) -> bool:
        """Whether these are the very files that were judged, unchanged; of a copied job.toml, its size and mtime."""
        first = 2 if self.is_toml_copied else 0
        data, toml = self.signatures()[:1], self.signatures()[1:]
        return data == judged[:1] and [s[first:] for s in toml] == [s[first:] for s in judged[1:]]

    def count_try(self) -> int:
        """Note on disk, before a submit, that it begins: also a submit that kills the process is counted then."""
        with (self.folder / _TRIES).open("ab") as file:
            file.write(b".")
            return file.tell()

    def forget_tries(self) -> None:
        (self.folder / _TRIES).unlink(missing_ok=True)

    def reason(self) -> str | None:
        """Why it was being rejected when the watcher stopped."""
        try:
            return (self.folder / _REASON).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def accept(self, accepted: Path, job_id: str) -> None:
        """Put the files away. The job.toml first: alone in a claim it would go back to the inbox (`undo`)."""
        for path in (self.toml, self.data):
            if path is not None:
                move(path, free_name(accepted, f"{job_id}-{path.name}"))
        self.close()

    def reject(self, rejected: Path, reason: str, when: str) -> str:
        """Put the files where their owner finds them, beside the reason; returns the data file's name there."""
        assert self.data is not None
        write_text(self.folder / _REASON, reason)  # from here on a restart only finishes this
        target = free_name(rejected, shown(self.data.name))
        write_text(target.with_name(target.name + ".reason.txt"), f"{one_line(reason)} ({when})\n")
        if self.toml is not None:
            move(self.toml, free_name(rejected, target.name + JOB_SUFFIX))
        move(self.data, target)
        self.close()
        return target.name

    def undo(self, inbox: Path, rejected: Path) -> None:
        """Killed between the two renames, or the data file was withdrawn: the job.toml waits for it again."""
        if self.toml is not None:
            is_replaced = os.path.lexists(inbox / self.toml.name)
            move(self.toml, free_name(rejected if is_replaced else inbox, self.toml.name))
        self.close()

    def close(self) -> None:
        """Remove the folder, whose files have gone where they belong."""
        for path in self.folder.iterdir():
            if path.name.startswith("."):
                path.unlink()
        self.folder.rmdir()


def open_claims(claimed: Path) -> list[Claim]:
    """Every claim that was not closed, oldest first."""
    claims = []
    for folder in sorted(path for path in claimed.iterdir() if path.is_dir() and not path.is_symlink()):
        files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        tomls = [path for path in files if path.name.endswith(JOB_SUFFIX)]
        data = [path for path in files if not path.name.endswith(JOB_SUFFIX)]
        claims.append(Claim(folder, data[0] if data else None, tomls[0] if tomls else None))
    return claims


def has_accepted(accepted: Path, job_id: str) -> bool:
    return any(name.startswith(job_id + "-") for name in os.listdir(accepted))


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, or check that it is one.

    Where the inbox was opened to others, one of them could have made the claim folder, or a link in its place.

    Raises:
        Unavailable: it is not a folder, another user's, or open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise Unavailable(f"{folder} is not a folder of this user alone (mode 0700): remove it")


@contextmanager
def alone(claimed: Path) -> Iterator[bool]:
    """Hold the claim folder's lock, or get False: `forq up` and `forq watch` on one home must not share a claim."""
    descriptor = os.open(claimed / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
