"""What is done to the service, when, and how long its rows stood still."""

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.chaos_harness.journal import History, LeaseKey
from benchmarks.chaos_harness.seams import NEED_A_BELL, NEED_A_JOBS_END, SEAMS
from benchmarks.chaos_harness.system import System
from benchmarks.chaos_harness.traffic import Traffic

WEIGHTS = {
    "kill_at_failpoint": 17,
    "stop_at_failpoint": 9,
    "worker_kill": 12,
    "worker_stop": 8,
    "tree_kill": 5,
    "up_kill": 4,
    "api_kill": 6,
    "watch_kill": 5,
    "broker_kill": 5,
    "broker_flush": 4,
    "broker_stop": 3,
    "postgres_kill": 8,
}
"""How often each kind of fault comes; `postgres_kill` only where there is one."""
FAILPOINTS = {"kill_at_failpoint": "kill", "stop_at_failpoint": "stop"}
"""Kinds that happen at a seam, and what the worker does to itself there."""
OVERLAP_SHARE = 0.25
"""Of all faults: those that the next one follows before the service has recovered. They are not timed."""
POLL_S = 0.05
TRIGGER_S = 3.0
REACH_TIMEOUT_S = 45.0


@dataclass
class Fault:
    kind: str
    seam: str | None = None
    at: float = 0.0
    continued_at: float = float("inf")
    """When a stopped worker went on."""
    interrupted: set[LeaseKey] = field(default_factory=set)
    recovered_s: float | None = None
    """Until rows of an interrupted shard were committed under a later lease; of any new lease where none was."""
    all_recovered_s: float | None = None
    part_back_s: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def was_done(self) -> bool:
        """False: the failpoint was not passed in time, or there was nothing to kill."""
        return not any(note.startswith(("NOT REACHED", "no ")) for note in self.notes)

    def __str__(self) -> str:
        recovered = "" if self.recovered_s is None else f" rows again after {self.recovered_s:.1f} s"
        back = "" if self.part_back_s is None else f" part back after {self.part_back_s:.1f} s"
        return f"{self.kind} {self.seam or ''}{back}{recovered} {'; '.join(self.notes)}".strip()


def deck(num_faults: int, rng: random.Random, *, with_postgres: bool, kinds: tuple[str, ...] = ()) -> list[Fault]:
    """The faults of a run in their order: kinds by weight, every seam as often as any other. `kinds` leaves others out;
    a failpoint may be named with its seam, as in `stop_at_failpoint:result_computed`."""
    wanted = {kind.partition(":")[0] for kind in kinds} or set(WEIGHTS)
    if not with_postgres:
        wanted.discard("postgres_kill")
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind in wanted}
    exact = {kind: num_faults * weight / sum(weights.values()) for kind, weight in weights.items()}
    counts = {kind: int(share) for kind, share in exact.items()}
    # Those that would not come at all are first to get one more.
    rest = sorted(exact, key=lambda kind: (counts[kind] > 0, counts[kind] - exact[kind]))
    for kind in rest[: num_faults - sum(counts.values())]:
        counts[kind] += 1
    named = [kind.partition(":")[2] for kind in kinds if ":" in kind]
    faults = []
    for kind, count in counts.items():
        order = named or sorted(SEAMS)
        rng.shuffle(order)
        seams = itertools.cycle(order)
        faults += [Fault(kind, next(seams) if kind in FAILPOINTS else None) for _ in range(count)]
    rng.shuffle(faults)
    return faults


class Injector:
    def __init__(
        self, system: System, traffic: Traffic, history: History, rng: random.Random, recovery_timeout_s: float
    ) -> None:
        self._system = system
        self._traffic = traffic
        self._history = history
        self._rng = rng
        self._timeout_s = recovery_timeout_s
        self._numbers = itertools.count()
        self._looked_up: set[LeaseKey] = set()

    def inject(self, fault: Fault) -> None:
        """Do it, and wait until the part that was hit is back, except where a part is back only with new rows."""
        if fault.seam is not None:
            self._failpoint(fault)
            return
        done: Callable[[Fault], None] = getattr(self, f"_{fault.kind}")
        done(fault)

    def wait_recovered(self, fault: Fault) -> bool:
        """Time the recovery; False if it did not come in time."""

        def first() -> float | None:
            return self._history.recovered_at(fault.at, fault.interrupted, fault.continued_at)

        def last() -> float | None:
            return self._history.recovered_at(fault.at, fault.interrupted, fault.continued_at, all_of_them=True)

        def recovered() -> bool:
            self._forget_ended(fault)
            return last() is not None

        if not self._until(recovered):
            fault.notes.append(f"NOT RECOVERED within {self._timeout_s:.0f} s")
        at, all_at = first(), last()
        fault.recovered_s = None if at is None else at - fault.at
        fault.all_recovered_s = None if all_at is None else all_at - fault.at
        return all_at is not None

    def _forget_ended(self, fault: Fault) -> None:
        """Leave out shards whose end was committed just before the fault: the journal had no time to say so."""
        leases = {(shard, token) for shard, token in fault.interrupted if (shard, token) not in self._looked_up}
        if leases:
            with contextlib.suppress(SQLAlchemyError):
                fault.interrupted -= leases & self._traffic.ended_leases({shard for shard, _ in leases})
                self._looked_up |= leases

    def _worker_kill(self, fault: Fault) -> None:
        pid = self._worker(fault)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._hit(fault, pid)

    def _worker_stop(self, fault: Fault) -> None:
        pid = self._worker(fault)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self._hit(fault, pid)
            self._continue_late(fault, pid)

    def _failpoint(self, fault: Fault) -> None:
        seam, identity = str(fault.seam), f"{next(self._numbers)}"
        needs_help = seam in (*NEED_A_BELL, *NEED_A_JOBS_END, "lease_marking")
        armed = self._system.folder / "armed.json"
        plan = {
            "id": identity,
            "seam": seam,
            "action": FAILPOINTS[fault.kind],
            "skip": self._rng.randrange(0, 1 if needs_help else 6),
        }
        armed.with_suffix(".new").write_text(json.dumps(plan))
        armed.with_suffix(".new").rename(armed)
        next_trigger, deadline = 0.0, time.monotonic() + REACH_TIMEOUT_S
        while identity not in self._history.seams:
            if time.monotonic() > deadline:
                armed.unlink(missing_ok=True)
                fault.at = time.monotonic()
                fault.notes.append("NOT REACHED")
                return
            if needs_help and time.monotonic() >= next_trigger:
                self._traffic.submit_small()
                next_trigger = time.monotonic() + TRIGGER_S
            self._step()
        fired = self._history.seams[identity]
        fault.at = fired["at"]
        fault.interrupted = self._history.held_by(fired["worker"], fault.at)
        if FAILPOINTS[fault.kind] == "stop":
            self._continue_late(fault, fired["pid"])

    def _tree_kill(self, fault: Fault) -> None:
        self._system.kill_up(whole_tree=True)
        self._restart_up(fault)

    def _up_kill(self, fault: Fault) -> None:
        self._system.kill_up(whole_tree=False)
        self._restart_up(fault)

    def _restart_up(self, fault: Fault) -> None:
        fault.at = time.monotonic()
        self._system.start()
        self._system.wait_up()
        fault.part_back_s = time.monotonic() - fault.at

    def _api_kill(self, fault: Fault) -> None:
        poster = threading.Thread(target=self._traffic.post_small)
        poster.start()
        time.sleep(self._rng.uniform(0, 0.2))
        self._kill_part(fault, "api")
        poster.join()
        self._back(fault, lambda: self._system.api_answers() and self._traffic.post_small())

    def _watch_kill(self, fault: Fault) -> None:
        self._traffic.drop_small()
        drop = self._system.settings.drop
        time.sleep(self._rng.uniform(0, drop.settle_s + 3 * drop.poll_s + 0.3))
        before = self._system.pids("watch")
        self._kill_part(fault, "watch")
        self._back(fault, lambda: bool(set(self._system.pids("watch")) - set(before)))

    def _broker_kill(self, fault: Fault) -> None:
        before = self._system.pids("broker")
        self._kill_part(fault, "broker")
        self._back(fault, lambda: bool(set(self._system.pids("broker")) - set(before)))

    def _broker_flush(self, fault: Fault) -> None:
        with self._system.broker() as broker:
            broker.flushall()
        fault.at = time.monotonic()

    def _broker_stop(self, fault: Fault) -> None:
        """It accepts connections and does not answer, for longer than a lease."""
        pids = self._system.pids("broker")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        fault.at = time.monotonic()
        time.sleep(2 * self._system.settings.queue.lease_s)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _postgres_kill(self, fault: Fault) -> None:
        postgres = self._system.postgres
        assert postgres is not None
        fault.at = time.monotonic()
        postgres.kill()
        time.sleep(self._rng.choice((0.0, 0.5, 2.0, 6.0)))
        postgres.start()
        fault.part_back_s = time.monotonic() - fault.at

    def _kill_part(self, fault: Fault, role: str) -> None:
        if not self._until(lambda: bool(self._system.pids(role))):
            fault.notes.append(f"no {role} to kill")
        for pid in self._system.pids(role):
            psutil.Process(pid).kill()
        fault.at = time.monotonic()

    def _worker(self, fault: Fault) -> int | None:
        """A worker that has leases, if there is one."""

        def candidates() -> list[int]:
            ids = self._history.worker_ids
            return [pid for pid in self._system.pids("worker") if self._history.held_by(ids.get(pid), time.monotonic())]

        if not self._until(lambda: bool(candidates())):
            fault.at = time.monotonic()
            fault.notes.append("no worker at work")
            return None
        return self._rng.choice(candidates())

    def _hit(self, fault: Fault, pid: int) -> None:
        fault.at = time.monotonic()
        self._history.read()
        fault.interrupted = self._history.held_by(self._history.worker_ids.get(pid), fault.at)

    def _continue_late(self, fault: Fault, pid: int) -> None:
        """SIGCONT once another worker has taken over, at the worst moment: while that one is at work."""
        queue = self._system.settings.queue
        deadline = fault.at + 2 * queue.lease_s + 2 * queue.sweep_s + 5
        while time.monotonic() < deadline and self._history.taken_over_at(fault.interrupted) is None:
            self._step()
        taken = self._history.taken_over_at(fault.interrupted)
        fault.notes.append("not taken over" if taken is None else f"taken over after {taken - fault.at:.1f} s")
        time.sleep(self._rng.choice((0.0, 0.1, 0.5, 1.5)))
        try:
            os.kill(pid, signal.SIGCONT)
            fault.continued_at = time.monotonic()
        except ProcessLookupError:
            fault.notes.append("gone while stopped")

    def _back(self, fault: Fault, is_back: Callable[[], bool]) -> None:
        if self._until(is_back):
            fault.part_back_s = time.monotonic() - fault.at
        else:
            fault.notes.append(f"PART NOT BACK within {self._timeout_s:.0f} s")

    def _until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._step()
        return True

    def _step(self) -> None:
        time.sleep(POLL_S)
        self._system.tend()
        self._history.read()
