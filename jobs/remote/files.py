"""The local file behind a path or a URL: to read, fetched first; to write, sent on when it is whole.

What runs between knows paths only, so every format and every check is the same for both.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.errors import BadInput, Unavailable
from jobs.remote import transfer
from jobs.remote.location import Location
from jobs.settings import Settings
from jobs.source import Progress, check_suffix, first_line

SCRATCH_PREFIX = "forq-remote-"
"""Of folders in `$FORQ_HOME/tmp`; jobs/upkeep clears those of the dead."""
_MAX_NAME_CHARS = 60  # 240 bytes at most: file systems allow 255


@contextmanager
def input_file(
    settings: Settings, location: Location, report: Progress, *, tenant: str | None = None
) -> Iterator[Path]:
    """A path to read for as long as the context is open.

    Args:
        report: told of bytes fetched; what it raises ends the transfer.
        tenant: of the API's caller; None for the operator.

    Raises:
        BadInput: the URL is under no root, or its object cannot be read.
        Unavailable: its server cannot be reached, or the disk is full.
    """
    if isinstance(location, Path):
        yield location
        return
    root = settings.storage.root_of(location, to_write=False, tenant=tenant)
    check_suffix(Path(location.name))  # now, not after gigabytes
    with _scratch(settings) as scratch:
        path = scratch / location.name[-_MAX_NAME_CHARS:]
        try:
            transfer.fetch(location, root, settings.storage, path, settings.limits.max_upload_bytes, report)
        except OSError as error:
            raise Unavailable(
                f"{location} cannot be stored ({first_line(error)}): check space and rights in {settings.home}"
            ) from None
        yield path


@contextmanager
def output_file(
    settings: Settings, location: Location, report: Progress, *, tenant: str | None = None
) -> Iterator[Path]:
    """A path to write. Behind a URL, all files of the path's folder are sent when the context ends without an error,
    each beside the URL under its own name; arguments and errors as of `input_file`."""
    if isinstance(location, Path):
        yield location
        return
    root = settings.storage.root_of(location, to_write=True, tenant=tenant)
    if len(location.name.encode()) > 240:
        raise BadInput(f"{location}: the file's name has over 240 bytes: use a shorter one")
    with _scratch(settings) as scratch:
        yield scratch / location.name
        for path in sorted(scratch.iterdir()):
            try:
                transfer.store(path, location.beside(path.name), root, settings.storage, report)
            except OSError as error:
                raise Unavailable(f"{location}: {path.name} cannot be read ({first_line(error)})") from None


@contextmanager
def _scratch(settings: Settings) -> Iterator[Path]:
    # Under FORQ_HOME: the file may be larger than what /tmp can hold.
    folder = settings.home / "tmp"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder) as scratch:
        yield Path(scratch)
