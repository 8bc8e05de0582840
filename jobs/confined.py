"""Reads a user's file in a process of its own, with limits: a file may expand a million times, a template may never
end, a decoder may crash. The process then ends, and its parent has one line to say.

The child is forked from a server that has imported what it needs, which takes milliseconds. It limits itself: its
memory by RLIMIT_AS, its time by an alarm that every progress sets anew, so that it also ends when its parent is gone.
What it says comes as JSON, never as pickles: whoever got hold of the child would otherwise have the parent, too.
"""

import atexit
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from jobs.batch_check import RefusedLines
from jobs.errors import BadInput, Unavailable
from jobs.reading import Reading, Request, read
from jobs.rows import Mapping
from jobs.settings import Limits
from jobs.source import Progress, first_line

_OUT_OF_MEMORY = 3
"""Exit code of a child that met its memory limit."""
_FAILED = 1

SOCKET_PREFIX = "forq-reader-"
"""Of the folder, with its process's id, where this process's server listens: jobs/upkeep clears those of the dead."""

_LONGEST_FOLDER = 107 - len(f"/{SOCKET_PREFIX}4194304-12345678/listener-12345678")
"""Bytes: a socket's whole path has room for 107."""

processes = multiprocessing.get_context("forkserver")
"""Where children come from, after `prepare_server`; jobs/remote/transfer.py has its own there."""


Work: TypeAlias = Callable[[Progress], dict[str, Any]]
"""A function at a module's top, or a `partial` of one; what it returns must go into JSON."""


def read_confined(request: Request, limits: Limits, scratch: Path, report: Progress) -> Reading:
    """`jobs.reading.read` in a child; errors as of `run_confined`.

    Raises:
        RefusedLines: as `read`.
    """
    said = run_confined(partial(_read, request, limits, scratch), request.path.name, limits, report)
    return Reading(
        mapping=Mapping.model_validate(said["mapping"]),
        spool=Path(said["spool"]),
        failed_per_shard=said["failed_per_shard"],
        num_rows=said["num_rows"],
        kept=Path(said["kept"]),
        version=tuple(said["version"]),
        model=said["model"],
        decoding=said["decoding"],
    )


def _read(request: Request, limits: Limits, scratch: Path, report: Progress) -> dict[str, Any]:
    found = read(request, limits, scratch, report)
    said = {field.name: getattr(found, field.name) for field in fields(found)}
    return {**said, "mapping": found.mapping.model_dump(), "spool": str(found.spool), "kept": str(found.kept)}


def run_confined(work: Work, name: str, limits: Limits, report: Progress) -> dict[str, Any]:
    """Do `work` in a child, within `limits.submit_memory_bytes` and `limits.submit_stall_s`.

    Args:
        name: of the file that it reads, for messages.

    Raises:
        RefusedLines: as `work`.
        BadInput: as `work`; or it took more memory or time than the limits say, or the file broke its reader.
        Unavailable: the child failed in a way that is ours.
        OSError: as `work`, or no process can be started.
    """
    prepare_server(os.getpid())
    receiving, sending = processes.Pipe(duplex=False)
    child = processes.Process(target=_run, args=(work, limits, sending), name="forq-reader", daemon=True)
    child.start()
    sending.close()
    news: dict[str, Any] = {}
    num_rows = 0
    try:
        with suppress(EOFError):
            while True:
                news = json.loads(receiving.recv_bytes())
                if "phase" in news:
                    num_rows = news["done"] if news["phase"] == "reading" else 0
                    report(news["phase"], news["done"], news["total"])
        child.join()
    finally:
        receiving.close()
        child.kill()
        child.join()
    if "found" in news:
        found: dict[str, Any] = news["found"]
        return found
    if "faults" in news:
        raise RefusedLines(news["faults"])
    if "refused" in news:
        raise BadInput(news["refused"])
    if "os_error" in news:
        raise OSError(*news["os_error"])
    assert child.exitcode is not None
    raise _death(name, limits, child.exitcode, num_rows, news.get("failed"))


def socket_folders() -> list[Path]:
    """Where servers may listen, this process's own in the last: /tmp where TMPDIR is too long for a socket."""
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        return [Path("/tmp"), folder]  # noqa: S108  (mkdtemp makes a folder of its own there)
    return [folder, Path("/tmp")]  # noqa: S108


@cache
def prepare_server(pid: int) -> None:
    """Say what the server of this process is to import and where it is to listen; it starts when it is first needed."""
    processes.set_forkserver_preload(["jobs.reading"])
    # By itself multiprocessing makes a folder whose name says nothing: after `kill -9` nobody would know it for ours.
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        config["tempdir"] = tempfile.mkdtemp(prefix=f"{SOCKET_PREFIX}{pid}-", dir=socket_folders()[-1])
        atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)


def _death(name: str, limits: Limits, code: int, num_rows: int, failed: str | None) -> BadInput | Unavailable:
    where = f"{name}, behind row {num_rows}," if num_rows else name
    if code in (_OUT_OF_MEMORY, -signal.SIGKILL):
        return BadInput(
            f"{where} takes more memory to read than limits.submit_memory_bytes, {limits.submit_memory_bytes}: write "
            "it with smaller cells and row groups, use a simpler template, or raise the limit"
        )
    if code == -signal.SIGALRM:
        return BadInput(
            f"{where} took longer than limits.submit_stall_s, {limits.submit_stall_s} s, over one batch of rows: use a "
            "simpler template, or raise the limit"
        )
    if code < 0:
        return BadInput(f"{where} broke its reader ({signal.Signals(-code).name}): write it again")
    return Unavailable(f"{where} could not be read: its reader failed ({failed or f'exit code {code}'}): report this")


def _run(work: Work, limits: Limits, sending: Connection) -> None:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in silence
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory(limits.submit_memory_bytes)

    def tell(news: dict[str, Any]) -> None:
        try:
            sending.send_bytes(json.dumps(news).encode())
        except OSError:  # nobody waits for it any more
            raise SystemExit(_FAILED) from None

    def report(phase: str, done: int, total: int) -> None:
        signal.alarm(limits.submit_stall_s)
        tell({"phase": phase, "done": done, "total": total})

    signal.alarm(limits.submit_stall_s)
    try:
        tell({"found": work(report)})
    except RefusedLines as error:
        tell({"faults": error.faults})
    except BadInput as error:
        tell({"refused": str(error)})
    except MemoryError:
        raise SystemExit(_OUT_OF_MEMORY) from None
    except OSError as error:
        tell({"os_error": [error.errno, error.strerror or first_line(error)]})
    except Exception as error:
        tell({"failed": type(error).__name__})  # without its text, which may hold a cell of the file
        raise SystemExit(_FAILED) from None


def _limit_memory(num_bytes: int) -> None:
    """Of the address space: what is over it fails as MemoryError, in Arrow, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts
