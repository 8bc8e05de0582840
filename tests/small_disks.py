"""A real file system that is soon full: a tmpfs of so many bytes, mounted where that is allowed (root)."""

import contextlib
import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_BALLAST = "ballast"


class SmallDisk:
    """A mounted file system; `fill` takes what is free, `free` gives it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, *, but: int = 0) -> None:
        """Write until nothing is free, or `but` so many bytes."""
        with (self.folder / _BALLAST).open("ab", buffering=0) as file:
            if but:
                found = os.statvfs(self.folder)
                file.write(bytes(max(0, found.f_bavail * found.f_frsize - but)))
                return
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        if file.write(bytes(size)) < size:
                            break
        with pytest.raises(OSError, match=re.escape(os.strerror(errno.ENOSPC))):
            (self.folder / "probe").write_bytes(bytes(1 << 16))
        (self.folder / "probe").unlink(missing_ok=True)

    def free(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """All that is there but the ballast, hidden names too."""
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))
        return sorted(name for name in found if name != _BALLAST)


# Unmounts when its standard input ends, that is with the test process, however that ends (kill -9 too).
_GUARD = 'mount -t tmpfs -o "size=$1,mode=700" forq-test "$2" && echo mounted && cat; umount --lazy "$2" 2>/dev/null'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Makes small disks of so many bytes; its tests are skipped, visibly, where nothing can be mounted."""
    guards: list[subprocess.Popen[str]] = []

    def make(size: int) -> SmallDisk:
        folder = tmp_path / f"disk{len(guards)}"
        folder.mkdir()
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", str(size), str(folder)], text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        guards.append(guard)
        assert guard.stdout is not None
        if guard.stdout.readline() != "mounted\n":
            pytest.skip(f"no small file system can be mounted here: {guard.communicate()[1].strip()}")
        return SmallDisk(folder)

    yield make
    for guard in guards:
        guard.communicate()
