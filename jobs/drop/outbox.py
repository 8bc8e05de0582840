"""The outbox: a receipt for every file taken from the inbox, and its results once the job has ended.

The receipts are the only state, so a restart forgets nothing: a receipt whose `results` are null is pending. What is
kept in memory only saves reading the same receipts again.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy import select
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db.models import Job
from db.session import Database
from db.states import ENDED
from jobs.drop.files import shown, write_text
from jobs.errors import ForqError, QueueFull, Unavailable
from jobs.export import export_job
from jobs.service import job_status
from jobs.settings import Settings
from jobs.source import first_line, is_jsonl

RECEIPT_SUFFIX = ".job.json"
MAX_RETRY_S = 300.0
"""A failing export or submit is tried again after one poll, then after twice as long each time, up to this."""
_IDS_PER_QUERY = 500
_MAX_RECEIPT_BYTES = 1 << 20
DATABASE_AWAY = (OperationalError, InterfaceError, PoolTimeout)

log = structlog.get_logger()


class Stopping(Exception):
    """Leaves a long read or export when the watcher is asked to stop; what was half done is thrown away."""


class Receipt(BaseModel):
    """`<stem>.job.json`: what became of one dropped file."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    file: str
    """The name under which it was dropped."""
    model: str
    submitted_at: str
    duplicate: bool
    """The same content with the same options was a job already; these are that job's results."""
    state: str
    results: str | None = None
    """The results' name in this folder."""
    counts: dict[str, int] | None = None
    finished_at: str | None = None
    error: str | None = None
    claim_id: str
    """Ties the receipt to the claimed file, so that a watcher killed between the two does not write it twice."""


class Backoff:
    """When to try a failing thing again, on an injected clock."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._clock = clock
        self._failing: dict[str, tuple[float, float]] = {}

    def is_due(self, key: str) -> bool:
        return key not in self._failing or self._clock() >= self._failing[key][0]

    def failed(self, key: str) -> None:
        delay_s = min(self._failing[key][1] * 2, MAX_RETRY_S) if key in self._failing else self._first_s
        self._failing[key] = (self._clock() + delay_s, delay_s)

    def worked(self, key: str) -> None:
        self._failing.pop(key, None)


class Outbox:
    """Writes receipts and fills them. One process at a time: the inbox's lock sees to that."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        clock: Callable[[], float],
        check_stop: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.folder = settings.home / "outbox"
        self._settings = settings
        self._database = database
        self._check_stop = check_stop
        self._backoff = Backoff(settings.drop.poll_s, clock)
        self._ended: dict[str, int] = {}
        """Receipts that need nothing more, with their inode: every write of a receipt makes a new one."""
        self._pending: dict[str, tuple[int, Receipt]] = {}

    def open_receipt(self, receipt: Receipt) -> str:
        """Write a new receipt under a stem that nothing in the outbox uses; returns its file name."""
        stem = PurePath(receipt.file).stem
        taken = set(os.listdir(self.folder))
        candidate, number = stem, 1
        while any(candidate + suffix in taken for suffix in (RECEIPT_SUFFIX, ".parquet", ".jsonl")):
            number += 1
            candidate = f"{stem}-{number}"
        self._write(candidate + RECEIPT_SUFFIX, receipt)
        return candidate + RECEIPT_SUFFIX

    def find_receipt(self, claim_id: str, file: str) -> Receipt | None:
        """The receipt a claimed file already has: only asked after a restart, since it reads them."""
        stem = PurePath(file).stem
        for name in os.listdir(self.folder):
            if name.startswith(stem) and name.endswith(RECEIPT_SUFFIX):
                receipt = read_receipt(self.folder / name)
                if receipt is not None and receipt.claim_id == claim_id:
                    return receipt
        return None

    def update(self) -> list[str]:
        """Follow the pending jobs, and export those that have ended; returns the results' file names.

        Raises:
            sqlalchemy.exc.OperationalError and its like (`DATABASE_AWAY`): the database cannot be reached.
        """
        self._look()
        states = self._states({receipt.job_id for _, receipt in self._pending.values()})
        exported = []
        for name, (_, receipt) in sorted(self._pending.items()):
            self._check_stop()
            if not self._backoff.is_due(name):
                continue
            try:
                results = self._advance(name, receipt, states.get(receipt.job_id))
            except (Stopping, *DATABASE_AWAY):
                raise  # the database is away for all of them
            except Exception as error:  # one job's export must not stop the others, whatever it raises
                self._backoff.failed(name)
                self._note_error(name, receipt, error)
                continue
            if results is not None:
                exported.append(results)
        return exported

    def remove_leftovers(self) -> None:
        """Delete half-written exports of processes that are gone; called once, before this process writes any."""
        for path in self.folder.glob(".*.tmp"):
            pid = path.name.split(".")[-3] if path.name.count(".") > 3 else ""
            if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
                path.unlink(missing_ok=True)

    def _look(self) -> None:
        with os.scandir(self.folder) as entries:  # inodes come with the names: no stat, however many there are
            found = {entry.name: entry.inode() for entry in entries if entry.name.endswith(RECEIPT_SUFFIX)}
        self._ended = {name: inode for name, inode in self._ended.items() if found.get(name) == inode}
        self._pending = {name: known for name, known in self._pending.items() if found.get(name) == known[0]}
        for name, inode in found.items():
            if name.startswith(".") or name in self._ended or name in self._pending:
                continue
            receipt = read_receipt(self.folder / name)
            if receipt is None:
                log.warning("receipt_not_readable", receipt=shown(name))
            if receipt is None or receipt.results is not None:
                self._ended[name] = inode
            else:
                self._pending[name] = (inode, receipt)

    def _states(self, job_ids: Iterable[str]) -> dict[str, str]:
        ids, states = sorted(job_ids), {}
        for start in range(0, len(ids), _IDS_PER_QUERY):
            chunk = ids[start : start + _IDS_PER_QUERY]
            with self._database.read() as connection:
                rows = connection.execute(select(Job.id, Job.state).where(Job.id.in_(chunk))).all()
            states.update({row.id: row.state for row in rows})
        return states

    def _advance(self, name: str, receipt: Receipt, state: str | None) -> str | None:
        if state is None:
            # A power cut can take SQLite's last commit with it, or the database was replaced.
            raise ForqError(f"job {receipt.job_id} is not in the database: drop the file again (it is in accepted/)")
        if state in ENDED:
            return self._export(name, receipt)
        if state != receipt.state or receipt.error is not None:
            self._write(name, receipt.model_copy(update={"state": state, "error": None}))
        self._backoff.worked(name)
        return None

    def _export(self, name: str, receipt: Receipt) -> str | None:
        # OpenAI's lines come back as OpenAI's lines.
        suffix, format = ("jsonl", "openai") if is_jsonl(Path(receipt.file)) else ("parquet", "parquet")
        results = name.removesuffix(RECEIPT_SUFFIX) + "." + suffix
        status = job_status(self._database, receipt.job_id)
        if status["state"] not in ENDED:  # `retry` opened it again since
            return None
        exported = export_job(
            self._database,
            self._settings,
            receipt.job_id,
            self.folder / results,
            format=format,
            progress=self._check_stop,
        )
        facts = {key: status[key] for key in ("state", "counts", "finished_at", "error")}
        self._write(name, receipt.model_copy(update={**facts, "results": results}))
        self._backoff.worked(name)
        log.info(
            "drop_exported",
            job_id=receipt.job_id,
            state=status["state"],
            results=shown(results),
            num_rows=exported.num_rows,
        )
        return results

    def _note_error(self, name: str, receipt: Receipt, error: Exception) -> None:
        log.warning("drop_export_failed", job_id=receipt.job_id, receipt=shown(name), reason=type(error).__name__)
        # Only what forq itself says is repeated: any other message might quote the rows.
        text = first_line(error) if isinstance(error, ForqError | OSError) else f"unexpected {type(error).__name__}"
        if text == receipt.error:
            return
        try:
            self._write(name, receipt.model_copy(update={"error": text}))
        except OSError:
            log.warning("receipt_not_written", job_id=receipt.job_id, receipt=shown(name))

    def _write(self, name: str, receipt: Receipt) -> None:
        path = self.folder / name
        write_text(path, json.dumps(receipt.model_dump(), indent=2, ensure_ascii=False) + "\n")
        inode = path.lstat().st_ino
        if receipt.results is None:
            self._pending[name] = (inode, receipt)
        else:
            self._pending.pop(name, None)
            self._ended[name] = inode


def read_receipt(path: Path) -> Receipt | None:
    """None for what is not a receipt of ours, or is gone."""
    try:
        with path.open("rb") as file:
            values: Any = json.loads(file.read(_MAX_RECEIPT_BYTES))
        return Receipt.model_validate(values)
    except (OSError, ValueError, RecursionError, ValidationError):
        return None


def is_our_trouble(error: BaseException) -> bool:
    """Whether an error is the machine's or the moment's (disk full, database away, queue full), so that the same file
    may do later."""
    if isinstance(error, ForqError):
        return isinstance(error, Unavailable | QueueFull)
    if isinstance(error, OSError):
        return error.errno is not None  # Arrow raises OSError without a number for damaged pages
    return isinstance(error, DATABASE_AWAY)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
