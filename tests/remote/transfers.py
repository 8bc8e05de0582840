"""What the tests of both kinds of object stores do: read, write, look at the transfer's process and what it left."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from jobs.remote.files import input_file, output_file
from jobs.remote.urls import parse_url
from jobs.settings import Settings

MIB = 1 << 20


class Stopped(Exception):
    pass


def silent(phase: str, done: int, total: int) -> None: ...


def moving(report: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Without the time that a busy machine takes to connect."""
    return lambda phase, done, total: report(phase, done, total) if phase != "connecting" else None


def read(settings: Settings, url: str, report: Callable[[str, int, int], None] = silent) -> bytes:
    with input_file(settings, parse_url(url), moving(report)) as path:
        return path.read_bytes()


def write(settings: Settings, url: str, content: bytes, report: Callable[[str, int, int], None] = silent) -> None:
    with output_file(settings, parse_url(url), moving(report)) as path:
        path.write_bytes(content)


def left_behind(settings: Settings) -> list[Path]:
    return list((settings.home / "tmp").iterdir())


def transfers() -> list[psutil.Process]:
    """The running children of this process's server."""
    found = []
    for server in psutil.Process().children():
        with suppress(psutil.Error):
            if "forkserver" in " ".join(server.cmdline()):
                found += [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE]
    return found
