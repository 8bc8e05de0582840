"""The shard loop: lease, feed the engine, write what has finished, end the shard.

Many loops run at once, each in its own `threading.Thread` (one Celery task), all over the same engine. What keeps the
engine full is not the number of shards but the number of rows inside it: a loop leases the next shard as soon as fewer
than `rows_in_flight` rows are left, so the long tail of one shard never holds up the others.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from db.session import Database
from db.states import JobState
from jobs import ending, leases, results
from jobs.errors import LeaseLost
from jobs.leases import Lease, Renewal
from jobs.results import PendingRow, RowResult
from jobs.settings import Settings
from worker.backend import Backend, Decoding, EngineDead, Finished, Refused, Sample
from worker.database_retry import LEASING, outage, retrying
from worker.gate import EngineGate
from worker.generation import RowInFlight, advance, cannot_decode, prepare, result_of
from worker.in_flight import RowsInFlight
from worker.prompts import PromptEncoder

FLUSH_ROWS = 256
PAUSE_AFTER_ERROR_S = 0.5
POLL_S = 0.2
"""How often a waiting loop looks at stop, cancellation and lost leases."""

log = structlog.get_logger()


@dataclass
class Control:
    """What the outside wants of the loops: written by signals and the heartbeat, read by every loop."""

    stopping: threading.Event = field(default_factory=threading.Event)
    stop_deadline: float = float("inf")
    """On the monotonic clock: after it, rows in flight are given up."""
    renewal: Renewal = field(default_factory=lambda: Renewal(frozenset(), frozenset()))
    renewed_at: float = 0.0
    """When `renewal` was asked for, on the monotonic clock."""

    def stop(self, drain_s: float) -> None:
        self.stop_deadline = min(self.stop_deadline, time.monotonic() + drain_s)
        self.stopping.set()


class ShardLoop:
    """Runs shards of one model over one backend; any number of `threading.Thread`s may call `run_available`."""

    def __init__(
        self, database: Database, settings: Settings, owner: str, model: str, backend: Backend, encoder: PromptEncoder
    ) -> None:
        self._database = database
        self._settings = settings
        self._owner = owner
        self._model = model
        self._backend = backend
        self._encoder = encoder
        self.control = Control()
        limit = settings.queue.rows_in_flight or 2 * backend.facts.max_num_seqs
        self.rows_in_flight = RowsInFlight(limit)
        self.gate = EngineGate(POLL_S)
        self._leasing = threading.Lock()
        self._known: set[tuple[int, int]] = set()
        self._known_lock = threading.Lock()  # its own: leasing may wait for the database

    def known_leases(self) -> frozenset[tuple[int, int]]:
        """(shard id, token) of every lease that a loop works on."""
        with self._known_lock:
            return frozenset(self._known)

    def run_available(self) -> int:
        """Lease and run shards until none is left or the worker stops. Returns how many it ran."""
        num_run = 0
        while (lease := self._next()) is not None:
            self._run(lease)
            num_run += 1
        return num_run

    def _next(self) -> Lease | None:
        while not self.control.stopping.is_set() and self._backend.failure is None:
            if not self.rows_in_flight.wait_for_room(POLL_S):
                continue
            # One at a time: whoever leases counts its rows before the next loop looks for room.
            with self._leasing:
                if not self.rows_in_flight.has_room:
                    continue
                try:
                    lease = self._acquire()
                except retrying.errors as error:
                    outage.note(LEASING, error)
                    return None  # the poller asks again
                outage.over(LEASING)
                if lease is not None:
                    with self._known_lock:
                        self._known.add((lease.shard_id, lease.token))
                    self.rows_in_flight.add(lease, lease.end_row - lease.start_row)
                return lease
        return None

    def _acquire(self) -> Lease | None:
        """Lease a shard; of a job that has its share of the rows here, only when no other job waits."""
        acquire = partial(leases.acquire, self._database, self._model, self._owner, self._settings.queue.lease_s)
        at_their_share = self.rows_in_flight.jobs_at_their_share()
        lease = acquire(passing_over=at_their_share)
        return acquire() if lease is None and at_their_share else lease

    def _run(self, lease: Lease) -> None:
        """Run one leased shard to its end, or give it back."""
        shard = _Shard(self, lease)
        try:
            shard.run()
        except LeaseLost as error:
            log.warning("lease_lost", lease=str(lease), reason=str(error))
            # Where only the answer to a commit was lost, its repetition was refused and the lease is still ours.
            self._give_back(lease, crashed=False)
        except EngineDead:
            pass  # the worker releases every lease at once and ends its process
        except BaseException as error:  # a panic in a tokenizer's Rust code is no Exception
            log.exception("shard_failed", lease=str(lease))
            self._give_back(lease, crashed=not isinstance(error, retrying.errors))
            self.control.stopping.wait(PAUSE_AFTER_ERROR_S)  # what failed at once would fail at once again
        finally:
            shard.close()
            with self._known_lock:
                self._known.discard((lease.shard_id, lease.token))

    def _give_back(self, lease: Lease, *, crashed: bool) -> None:
        """Release a lease nobody works on: kept, it would be renewed for ever. Does nothing if it is another's now."""
        with contextlib.suppress(*retrying.errors):
            leases.release(self._database, lease, crashed=crashed)

    @property
    def model(self) -> str:
        return self._model

    @property
    def database(self) -> Database:
        return self._database

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def encoder(self) -> PromptEncoder:
        return self._encoder

    @property
    def restoration(self) -> str:
        return self._settings.model(self._model).restoration

    def prepare(self, row: PendingRow, lease: Lease, decoding: Decoding) -> RowInFlight | RowResult:
        default = self._settings.model(self._model).default_max_tokens
        return prepare(row, self._encoder, self._backend.facts, default, f"{lease.shard_id}.{lease.token}", decoding)

    def advance(self, in_flight: RowInFlight, item: Finished | Refused) -> Sample | None:
        default = self._settings.model(self._model).default_max_tokens
        return advance(in_flight, item, self._encoder, self._backend.facts, default, self.restoration)


class _Shard:
    """One leased shard: which rows are in the engine, which results wait to be written."""

    def __init__(self, loop: ShardLoop, lease: Lease) -> None:
        self._loop = loop
        self._lease = lease
        self._acquired_at = time.monotonic()
        self._inbox: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
        self._in_flight: dict[int, RowInFlight] = {}
        self._by_key: dict[str, RowInFlight] = {}
        self._unwritten: list[RowResult] = []
        self._flushed_at = time.monotonic()
        self._counted = lease.end_row - lease.start_row
        self._is_inside = False
        self._decoding = Decoding()

    def run(self) -> None:
        work = retrying.call(self._loop.control.stopping, lambda: results.load(self._loop.database, self._lease))
        self._uncount(self._counted - len(work.rows))
        if work.job_state == JobState.CANCELLING:
            leases.abandon(self._loop.database, self._lease)
            return
        self._decoding = _decoding_of(work, self._lease)
        fault = cannot_decode(self._decoding, self._loop.backend.facts, self._loop.model)
        if fault is not None:
            self._call(partial(self._fail_job, fault))
            return
        log.info("shard_started", lease=str(self._lease), rows=len(work.rows))
        suspect = self._lease.attempts >= self._loop.settings.queue.max_attempts
        self._is_inside = self._loop.gate.enter(alone=suspect, go_on=self._may_go_on)
        if not self._is_inside:
            return
        finished = self._run_one_by_one(work.rows) if suspect else self._run_together(work.rows)
        if finished:
            self._call(lambda: leases.finish(self._loop.database, self._lease))
            log.info("shard_done", lease=str(self._lease))

    def close(self) -> None:
        """Take whatever is left out of the engine and out of the count, however the shard ended."""
        if self._by_key:
            self._loop.backend.abort(list(self._by_key))
        if self._is_inside:
            self._loop.gate.leave()
        self._uncount(self._counted)

    def _fail_job(self, reason: str) -> None:
        """Every row would fail alike: the job cannot run at all."""
        ending.fail_job(self._loop.database, self._lease.job_id, reason)
        leases.release(self._loop.database, self._lease)  # where the job was cancelled meanwhile, and did not fail
        log.warning("job_failed", lease=str(self._lease), reason=reason)

    def _run_together(self, rows: list[PendingRow]) -> bool:
        for row in rows:
            if not self._may_go_on():  # a row's prompt or grammar may take seconds
                return False
            self._start(row)
        return self._collect()

    def _run_one_by_one(self, rows: list[PendingRow]) -> bool:
        """The shard's workers keep dying: run each row alone, noting so before, until one is found to be the cause."""
        limit = self._loop.settings.queue.max_attempts
        for row in rows:
            if row.attempts >= limit:
                message = f"the worker died {row.attempts} times while only this row was in its engine; given up"
                self._end(RowResult(row.request_id, error_code="poison", error=message))
                continue
            # The engine may have died of the shard before this one: then this row is not to be counted.
            if not self._may_go_on():
                return False
            self._call(partial(results.count_attempt, self._loop.database, self._lease, row))
            self._start(row)
            if not self._collect():
                # Stopped, not dead: the row is not to blame.
                self._call(partial(results.take_attempt_back, self._loop.database, row))
                return False
        return self._collect()

    def _start(self, row: PendingRow) -> None:
        prepared = self._loop.prepare(row, self._lease, self._decoding)
        if isinstance(prepared, RowResult):
            self._end(prepared)
            return
        self._in_flight[row.request_id] = prepared
        self._by_key.update((sample.key, prepared) for sample in prepared.samples)
        self._loop.backend.submit(prepared.samples, self._inbox.put)

    def _collect(self) -> bool:
        """Wait for every row in flight, writing results as they come. False when the shard was given back instead."""
        while self._in_flight:
            try:
                self._take(self._inbox.get(timeout=POLL_S))
                while True:
                    self._take(self._inbox.get_nowait())
            except queue.Empty:
                pass
            due = time.monotonic() - self._flushed_at >= self._loop.settings.queue.flush_s
            if due or len(self._unwritten) >= FLUSH_ROWS:
                self._flush()
            if not self._may_go_on():
                return False
        self._flush()
        return True

    def _take(self, item: Finished | Refused) -> None:
        in_flight = self._by_key.pop(item.key, None)
        if in_flight is None:
            return
        following = self._loop.advance(in_flight, item)
        if following is not None:
            self._by_key[following.key] = in_flight
            self._loop.backend.submit([following], self._inbox.put)
        if in_flight.is_done:
            others = [sample.key for sample in in_flight.samples if self._by_key.pop(sample.key, None)]
            if others:
                self._loop.backend.abort(others)
            del self._in_flight[in_flight.row.request_id]
            self._end(result_of(in_flight, self._loop.encoder, self._loop.restoration))

    def _end(self, result: RowResult) -> None:
        self._unwritten.append(result)
        self._uncount(1)

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        batch, self._unwritten = self._unwritten, []
        if batch:
            self._call(lambda: results.write(self._loop.database, self._lease, batch))

    def _may_go_on(self) -> bool:
        """Look at the world: the engine's death, a lost lease, a cancelled job, the end of the drain time."""
        loop, lease = self._loop, self._lease
        if loop.backend.failure is not None:
            raise EngineDead(loop.backend.failure)
        control = loop.control
        # Only a renewal that was asked for after the lease was taken knows of it.
        if control.renewed_at > self._acquired_at and (lease.shard_id, lease.token) not in control.renewal.held:
            raise LeaseLost(f"{lease}: the heartbeat found it gone")
        if lease.job_id in control.renewal.cancelled_jobs:
            self._flush()
            self._call(lambda: leases.abandon(loop.database, lease))
            log.info("shard_cancelled", lease=str(lease))
            return False
        if control.stopping.is_set() and time.monotonic() >= control.stop_deadline:
            self._flush()
            self._call(lambda: leases.release(loop.database, lease))
            log.info("shard_released", lease=str(lease), rows_left=len(self._in_flight))
            return False
        return True

    def _call(self, write: Callable[[], object]) -> None:
        retrying.call(self._loop.control.stopping, write)

    def _uncount(self, num_rows: int) -> None:
        if num_rows:
            self._counted -= num_rows
            self._loop.rows_in_flight.add(self._lease, -num_rows)


def _decoding_of(work: results.ShardWork, lease: Lease) -> Decoding:
    name = work.decoding
    if work.kv_share is None:
        return Decoding(name, job_id=lease.job_id)
    return Decoding(name, pool=lease.job_id, pool_share=work.kv_share, job_id=lease.job_id)
