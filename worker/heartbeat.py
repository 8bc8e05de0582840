"""The worker's pulse, in a `threading.Thread` of its own so that a long engine step cannot lose a live lease: renews
leases, learns of cancellations, sweeps the queue, and rings again where shards wait and loops are idle."""

import threading
import time
from collections.abc import Callable

import structlog
from sqlalchemy import update

from db.clock import db_now
from db.models import Worker
from db.session import Database
from jobs import leases
from jobs.settings import Settings
from worker.database_retry import LEASING, PULSE, outage, retrying
from worker.shards import ShardLoop

RETRY_S = 1.0
"""Between beats while they fail."""

log = structlog.get_logger()


class Heartbeat:
    def __init__(
        self, database: Database, settings: Settings, owner: str, model: str, loop: ShardLoop, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when shards wait and this worker has room for them."""
        self._database = database
        self._settings = settings
        self._owner = owner
        self._model = model
        self._loop = loop
        self._wake = wake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._failing = False
        self._unknown: frozenset[tuple[int, int]] = frozenset()
        self._ringing: threading.Thread | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        next_sweep = time.monotonic()
        while not self._stop.is_set():
            pause_s = self._settings.queue.heartbeat_s
            try:
                self.beat()
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + self._settings.queue.sweep_s
                    self.sweep()
                outage.over(PULSE)
                if self._failing:
                    log.info("heartbeat_back")
                    self._failing = False
            except retrying.errors as error:
                outage.note(PULSE, error)
                pause_s = min(RETRY_S, pause_s)
            except Exception as error:  # of the database or the broker; without its pulse the worker loses its leases
                if not self._failing:
                    log.warning("heartbeat_failing", reason=type(error).__name__)
                    self._failing = True
                pause_s = min(RETRY_S, pause_s)
            self._stop.wait(pause_s)

    def beat(self) -> None:
        asked_at = time.monotonic()
        renewal = leases.renew(self._database, self._owner, self._settings.queue.lease_s)
        control = self._loop.control
        control.renewal, control.renewed_at = renewal, asked_at
        self._release_strangers(renewal.held)
        with self._database.write() as connection:
            connection.execute(update(Worker).where(Worker.id == self._owner).values(heartbeat_at=db_now()))

    def _release_strangers(self, held: frozenset[tuple[int, int]]) -> None:
        """Give back leases that no loop knows: the database granted them, but its answer was lost on the way.

        Only what was unknown at two beats in a row: a lease just granted is not noted yet.
        """
        unknown = held - self._loop.known_leases()
        for shard_id, token in unknown & self._unknown:
            leases.release_stranger(self._database, self._owner, shard_id, token)
            log.warning("lease_unknown", shard_id=shard_id, token=token)
        self._unknown = unknown

    def sweep(self) -> None:
        num_reaped = leases.sweep(self._database)
        if num_reaped:
            log.warning("leases_expired", shards=num_reaped)
        room = self._loop.rows_in_flight.has_room and not self._loop.control.stopping.is_set()
        if not leases.has_queued(self._database, self._model):
            outage.over(LEASING)  # nobody will ask
        elif room:
            self._ring()

    def _ring(self) -> None:
        """In a `threading.Thread` of its own: a broker that hangs for its whole time-out must not stop the pulse."""
        if self._ringing is None or not self._ringing.is_alive():
            self._ringing = threading.Thread(target=self._wake, name="ring", daemon=True)
            self._ringing.start()
