"""Work for the service while it is broken: a large job at all times, small files through the API and the drop folder.

Every batch has prompts of its own ("main-3 row 17"), so the judge can tell which jobs came from which batch.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.chaos_harness.plan import MODEL
from db.models import Shard
from db.session import Database
from db.states import ShardState
from jobs import doorbell
from jobs.errors import ForqError
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file

SMALL_ROWS = 20
SMALL_PRIORITY = 5
LOW_WATER_SHARDS = 40
FEED_S = 0.5


@dataclass
class Batch:
    name: str
    num_rows: int
    way: str
    """`main`, `api` or `drop`."""
    acknowledged: bool = False
    """The service said that it has it: then it must be there exactly once, else at most once."""


def prompt_of(batch: str, row: int) -> str:
    return f"{batch} row {row}"


@dataclass
class Traffic:
    settings: Settings
    database: Database
    rows: int
    """Of one main job."""
    max_tokens: int
    batches: dict[str, Batch] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _feeder: threading.Thread | None = None
    _submitters: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self.submit_main()
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._feeder.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in (*self._submitters, *([self._feeder] if self._feeder else [])):
            thread.join()

    def submit_main(self) -> None:
        self._submit(self._new("main", self.rows))

    def submit_small(self) -> None:
        """A job that ends soon, and rings the doorbell at once. Beside the caller, who must not wait for a lock that a
        stopped worker holds."""
        batch = self._new("main", SMALL_ROWS)

        def submit() -> None:
            with contextlib.suppress(SQLAlchemyError, ForqError):
                self._submit(batch, priority=SMALL_PRIORITY)

        self._submitters.append(threading.Thread(target=submit, name="submitter", daemon=True))
        self._submitters[-1].start()

    def post_small(self, timeout_s: float = 10.0) -> bool:
        """Submit through the API; whether it answered. Its own `threading.Thread` may run it."""
        batch = self._new("api", SMALL_ROWS)
        path = self._write(batch)
        form = {"model": MODEL, "priority": str(SMALL_PRIORITY), "max_tokens": str(self.max_tokens)}
        url = f"http://127.0.0.1:{self.settings.api_port}/v1/jobs"
        try:
            with path.open("rb") as file:
                answer = httpx.post(url, data=form, files={"file": (path.name, file)}, timeout=timeout_s)
            batch.acknowledged = answer.status_code == 201
        except httpx.HTTPError:
            pass
        return batch.acknowledged

    def drop_small(self) -> None:
        """Put a file into the drop folder, whole."""
        batch = self._new("drop", SMALL_ROWS)
        path = self._write(batch)
        path.rename(self.settings.home / "inbox" / path.name)
        batch.acknowledged = True

    def has_work(self) -> bool:
        with self.database.read() as connection:
            statement = select(func.count()).select_from(Shard).where(Shard.state == ShardState.QUEUED)
            return connection.execute(statement).scalar_one() >= LOW_WATER_SHARDS

    def ended_leases(self, shard_ids: set[int]) -> set[tuple[int, int]]:
        """Shard and token of the last lease, of those that have ended."""
        with self.database.read() as connection:
            statement = select(Shard.id, Shard.lease_token).where(
                Shard.id.in_(shard_ids), Shard.state == ShardState.DONE
            )
            return {(row.id, row.lease_token) for row in connection.execute(statement)}

    def _feed(self) -> None:
        while not self._stop.wait(FEED_S):
            with contextlib.suppress(SQLAlchemyError, ForqError):  # the database is away; the batch may be there or not
                if not self.has_work():
                    self.submit_main()

    def _new(self, way: str, num_rows: int) -> Batch:
        with self._lock:
            batch = Batch(f"{way}-{len(self.batches)}", num_rows, way)
            self.batches[batch.name] = batch
        return batch

    def _submit(self, batch: Batch, priority: int = 0) -> None:
        options = SubmitOptions(model=MODEL, priority=priority, sampling={"max_tokens": self.max_tokens})
        submitted = submit_file(self.database, self.settings, self._write(batch), options)
        batch.acknowledged = True
        doorbell.ring(self.settings, MODEL, submitted.num_shards)

    def _write(self, batch: Batch) -> Path:
        path = self.settings.home / "work" / f"{batch.name}.parquet"
        pq.write_table(pa.table({"prompt": [prompt_of(batch.name, row) for row in range(batch.num_rows)]}), path)
        return path
