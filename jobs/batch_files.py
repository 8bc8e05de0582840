"""Writes a batch's output and error files into the data store; they become files when their rows are inserted."""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from db.models import Job
from db.session import Database
from db.states import ENDED
from jobs import store
from jobs.batch_lines import CANCELLED, EXPIRED, iter_lines
from jobs.errors import Unavailable
from jobs.openai_files import OUTPUT, insert_file
from jobs.settings import Settings
from jobs.source import Progress, first_line


@dataclass(frozen=True)
class BatchFiles:
    """Files in the store that no row names yet; None where there are no such lines."""

    output: tuple[str, int] | None
    """Name in the store, bytes."""
    error: tuple[str, int] | None
    totals: dict[str, int]

    def insert(self, connection: Connection, batch: Row[*tuple[Any, ...]]) -> dict[str, str | None]:
        """The files' rows; returns what the batch's row says of them."""
        ids: dict[str, str | None] = {}
        for kind, written in (("output", self.output), ("error", self.error)):
            ids[f"{kind}_file_id"] = None
            if written is not None:
                row = insert_file(
                    connection,
                    tenant=batch.tenant,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose=OUTPUT,
                    num_bytes=written[1],
                    data_key=written[0],
                    expires_s=batch.options.get("output_expires_s"),
                )
                ids[f"{kind}_file_id"] = row.id
        return ids

    def agree_with(self, connection: Connection, job_id: str) -> bool:
        """Whether the job is still as it was written."""
        job = connection.execute(select(Job.__table__).where(Job.id == job_id)).one_or_none()
        if job is None or job.state not in ENDED:
            return False
        found = (job.num_rows, job.num_completed, job.num_failed + job.num_cancelled)
        return found == (self.totals["total"], self.totals["completed"], self.totals["failed"])


@dataclass
class _Written:
    """One file being written, and its hash."""

    path: Path
    num_lines: int = 0
    num_bytes: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb")

    def write(self, text: str) -> None:
        line = text.encode() + b"\n"
        self._file.write(line)
        self._digest.update(line)
        self.num_lines += 1
        self.num_bytes += len(line)

    def publish(self, folder: Path) -> tuple[str, int] | None:
        self._file.close()
        if self.num_lines == 0:
            return None
        key = f"{self._digest.hexdigest()}.jsonl"
        store.publish(self.path, folder / key)
        return key, self.num_bytes

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def write_files(
    database: Database, settings: Settings, batch: Row[*tuple[Any, ...]], *, is_late: bool, report: Progress
) -> BatchFiles:
    """Write a line per row of the batch's job: answers to one file, all others to the other.

    Raises:
        Unavailable: the disk is full, or a folder cannot be written.
    """
    folder = settings.data_dir
    totals = dict.fromkeys(("total", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens"), 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            answers, errors = (_Written(store.temporary_beside(folder / kind)) for kind in ("output", "error"))
            stack.callback(answers.close)
            stack.callback(errors.close)
            for line in iter_lines(database, batch.job_id, EXPIRED if is_late else CANCELLED, progress=report):
                (answers if line.is_answer else errors).write(line.text)
                for name in ("input_tokens", "cached_tokens", "output_tokens"):
                    totals[name] += getattr(line, name)
            totals["completed"], totals["failed"] = answers.num_lines, errors.num_lines
            totals["total"] = answers.num_lines + errors.num_lines
            return BatchFiles(answers.publish(folder), errors.publish(folder), totals)
    except OSError as error:
        raise Unavailable(f"batch {batch.id} cannot be written ({first_line(error)}): check space and rights") from None
