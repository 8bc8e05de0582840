"""Starts a transfer in a process of its own, watches over it, and turns its end into one line.

In a process of its own because a write that fails may be ended only by leaving it (`objects.upload`), a cloud's client
may hang or crash, and because its threads and connections are then gone, too. The process is forked from the server of
`jobs.confined`; credentials reach it in its environment, never as arguments.
"""

import json
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jobs.confined import prepare_server, processes
from jobs.errors import BadInput, Unavailable
from jobs.remote.urls import Url
from jobs.source import Progress, first_line
from jobs.storage_settings import StorageRoot, StorageSettings

LOOK_S = 1.0
"""How often `report` is called while nothing moves."""


def fetch(
    url: Url, root: StorageRoot, settings: StorageSettings, target: Path, max_bytes: int, report: Progress
) -> None:
    """Copy an object to a new local file.

    Args:
        report: told of bytes done and bytes in all; what it raises ends the transfer.

    Raises:
        BadInput: see `objects.download`.
        Unavailable: its server cannot be reached, fails, or sends nothing for `stall_s`.
        OSError: the local file cannot be written.
    """
    _transfer("downloading", ("download", url, root, settings, target, max_bytes), report)


def store(path: Path, url: Url, root: StorageRoot, settings: StorageSettings, report: Progress) -> None:
    """Copy a local file to an object, which appears only when it is whole; errors as of `fetch`."""
    _transfer("uploading", ("upload", url, root, settings, path, 0), report)


def _transfer(phase: str, said: tuple[Any, ...], report: Progress) -> None:
    _, url, _, settings, *_ = said
    prepare_server(os.getpid())
    receiving, sending = processes.Pipe(duplex=False)
    # The server's environment is as old as its first use.
    child = processes.Process(target=_run, args=(said, dict(os.environ), sending), name="forq-transfer", daemon=True)
    child.start()
    sending.close()
    news: dict[str, Any] = {}
    told = ("connecting", 0, 1)
    moved_at = time.monotonic()
    try:
        while "end" not in news:
            if not receiving.poll(LOOK_S):
                if time.monotonic() - moved_at > settings.stall_s:
                    raise Unavailable(
                        f"{url}: nothing moved for {settings.stall_s:g} s, the limit storage.stall_s: check its server "
                        "and the network, or raise the limit"
                    )
                report(*told)  # which may know that nobody waits any more
                continue
            moved_at = time.monotonic()
            try:
                news = json.loads(receiving.recv_bytes())
            except (EOFError, OSError):
                child.join()
                raise Unavailable(f"{url}: the transfer died (exit code {child.exitcode}): try again") from None
            if "done" in news:
                told = (phase, news["done"], news["total"])
                report(*told)
    finally:
        receiving.close()
        child.kill()
        child.join()
    if news["end"] == "refused":
        raise BadInput(news["line"])
    if news["end"] == "unavailable":
        raise Unavailable(news["line"])
    if news["end"] == "os_error":
        raise OSError(*news["os_error"])


def _run(said: tuple[Any, ...], environment: dict[str, str], sending: Connection) -> None:
    """The child. It leaves by `os._exit` whatever happens: an unfinished upload must not be closed."""
    name, url, root, settings, path, max_bytes = said
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)

    def tell(news: dict[str, Any]) -> None:
        try:
            sending.send_bytes(json.dumps(news).encode())
        except OSError:  # nobody waits for it any more
            os._exit(1)

    try:
        from jobs.remote import objects

        def report(done: int, total: int) -> None:
            tell({"done": done, "total": total})

        if name == "download":
            objects.download(url, root, settings, path, max_bytes, report)
        else:
            objects.upload(path, url, root, settings, report)
        tell({"end": "done"})
        os._exit(0)
    except BaseException as error:
        # Still in here: behind this block the error's frames are freed, and with them the stream, closed.
        tell(_end_of(error, url))
        os._exit(1)


def _end_of(error: BaseException, url: Url) -> dict[str, Any]:
    if isinstance(error, BadInput):
        return {"end": "refused", "line": str(error)}
    if isinstance(error, Unavailable):
        return {"end": "unavailable", "line": str(error)}
    if isinstance(error, OSError):
        return {"end": "os_error", "os_error": [error.errno, error.strerror or first_line(error)]}
    # Without its text, which may say who asked.
    return {"end": "unavailable", "line": f"{url}: the transfer failed ({type(error).__name__}): report this"}
