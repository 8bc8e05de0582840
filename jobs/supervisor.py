"""Runs the parts of the service on this machine as one process tree, restarts what dies, and leaves nothing behind.

Every part is a process of its own session, so that Ctrl-C reaches the supervisor alone, which then stops the parts in
order: first what brings work in, then the worker, which drains, then what tells of it, then the broker. The kernel
tells each part when the supervisor itself is killed (PR_SET_PDEATHSIG), so nothing outlives it either way.
"""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog
from filelock import FileLock, Timeout
from sqlalchemy import update
from ulid import ULID

from db.clock import db_now
from db.models import Worker
from db.session import Database
from jobs import leases, parts, service
from jobs.binding import local_url
from jobs.broker import EmbeddedBroker
from jobs.child import STOP_TIMEOUT_S, die_with_parent, end
from jobs.errors import Unavailable
from jobs.settings import Settings

START_TIMEOUT_S = 900.0
"""The first start may fetch and convert a model."""
POLL_S = 0.2
RESTART_AFTER_S = (0.5, 1, 2, 5, 10, 30)
"""Wait before the next restart, by how often a part died in a row."""
STEADY_S = 60.0
"""A part that ran this long starts again with the shortest wait."""
LOG_TAIL_LINES = 20

log = structlog.get_logger()


@dataclass
class Part:
    """One child process and how it is started, stopped and known to be ready."""

    role: str
    command: list[str]
    is_ready: Callable[["Part"], bool]
    stop_timeout_s: float = STOP_TIMEOUT_S
    worker_id: str | None = None
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    log_start: int = 0
    """Where this process's part of its log begins, in bytes."""
    restart_at: float | None = None
    deaths: int = 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Supervisor:
    settings: Settings
    model: str
    database: Database
    parts: list[Part] = field(default_factory=list)
    stopping: bool = False

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start everything, call `on_ready`, keep it running until a signal, stop everything. Returns the exit code.

        Raises:
            Unavailable: a part did not start, with the reason from its log.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._request_stop())
        with _broker(self.settings) as broker, parts.registered(self.settings, "up"):
            self.parts = self._make_parts()
            try:
                for part in self.parts:
                    self._start(part)
                self._wait_ready()
                if not self.stopping:
                    on_ready()
                while not self.stopping:
                    self._tend()
                    if broker is not None:
                        broker.tend()
                    time.sleep(POLL_S)
            finally:
                self._stop_all()
        return 0

    def _make_parts(self) -> list[Part]:
        forq = [sys.executable, "-m", "jobs.cli"]
        settings = self.settings
        drain_s = settings.queue.drain_s
        return [
            Part("worker", [*forq, "worker", "--model", self.model], self._worker_ready, drain_s + STOP_TIMEOUT_S),
            Part("api", [*forq, "api"], self._api_ready),
            Part("watch", [*forq, "watch"], lambda part: _is_registered(settings, part)),
            *([Part("webhooks", [*forq, "webhooks", "send"], lambda part: _is_registered(settings, part))]
              if settings.webhooks.allow else []),
        ]  # fmt: skip

    def _start(self, part: Part) -> None:
        command = list(part.command)
        if part.role == "worker":
            part.worker_id = str(ULID())
            command += ["--id", part.worker_id]
        with self.log_path(part.role).open("ab") as log_file:
            part.log_start = log_file.seek(0, os.SEEK_END)
            part.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        part.started_at, part.restart_at = time.monotonic(), None
        log.info("part_started", part=part.role, pid=part.process.pid)

    def _wait_ready(self) -> None:
        waiting = list(self.parts)
        deadline = time.monotonic() + START_TIMEOUT_S
        while waiting and not self.stopping:
            for part in list(waiting):
                if not part.alive:
                    self._bury(part)
                    raise Unavailable(f"{part.role} did not start: {self.last_error(part)}")
                if part.is_ready(part):
                    log.info("part_ready", part=part.role, seconds=round(time.monotonic() - part.started_at, 1))
                    waiting.remove(part)
            if time.monotonic() > deadline:
                raise Unavailable(f"{waiting[0].role} is not ready after {START_TIMEOUT_S:.0f} s: see its log")
            time.sleep(POLL_S)

    def _tend(self) -> None:
        """Restart what has died; a dead worker's shards go back to the queue at once."""
        now = time.monotonic()
        for part in self.parts:
            if part.alive:
                continue
            if part.restart_at is None:
                code = part.process.returncode if part.process is not None else None
                part.deaths = 1 if now - part.started_at > STEADY_S else part.deaths + 1
                wait_s = RESTART_AFTER_S[min(part.deaths, len(RESTART_AFTER_S)) - 1]
                part.restart_at = now + wait_s
                log.warning("part_died", part=part.role, code=code, restart_in_s=wait_s)
                self._bury(part)
            elif now >= part.restart_at:
                self._start(part)

    def _bury(self, part: Part) -> None:
        """A dead worker cannot say so itself: give its shards back, and let `ps` and waiting users know."""
        if part.worker_id is None or part.process is None:
            return
        try:
            num_shards = leases.release_all(self.database, part.worker_id, crashed=True)
            log.info("leases_released", worker_id=part.worker_id, shards=num_shards)
            reason = f"it died with exit code {part.process.returncode}"
            with self.database.write() as connection:
                connection.execute(
                    update(Worker)
                    .where(Worker.id == part.worker_id, Worker.exited_at.is_(None))
                    .values(state="exited", exited_at=db_now(), exit_reason=reason)
                )
        except Exception as error:  # leases expire by themselves
            log.warning("leases_not_released", reason=type(error).__name__)

    def _request_stop(self) -> None:
        if self.stopping:  # a second Ctrl-C: no more patience
            for part in self.parts:
                if part.alive and part.process is not None:
                    part.process.kill()
        self.stopping = True

    def _stop_all(self) -> None:
        order = {"watch": 0, "api": 0, "worker": 1, "webhooks": 2}
        for stage in (0, 1, 2):
            for part in self.parts:
                if order[part.role] == stage and part.alive and part.process is not None:
                    part.process.send_signal(signal.SIGTERM)
            for part in self.parts:
                if order[part.role] == stage and part.process is not None:
                    end(part.process, part.stop_timeout_s)
                    log.info("part_stopped", part=part.role, code=part.process.returncode)

    def _worker_ready(self, part: Part) -> bool:
        rows = service.workers(self.database)
        return any(row["id"] == part.worker_id and row["state"] == "ready" for row in rows)

    def _api_ready(self, part: Part) -> bool:
        url = f"{local_url(self.settings)}/healthz"
        if not _is_registered(self.settings, part):
            return False
        # Our own child, which has just bound the port; its certificate names the outer host, not loopback.
        tls = None if self.settings.api.ssl_certfile is None else ssl._create_unverified_context()  # noqa: S323
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2, context=tls) as answer:  # noqa: S310
            return bool(answer.status == 200)
        return False

    def log_path(self, role: str) -> Path:
        folder = self.settings.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{role}.log"

    def last_error(self, part: Part) -> str:
        """The most telling line that a dead part wrote, or how it ended."""
        path = self.log_path(part.role)
        with path.open("rb") as log_file:
            log_file.seek(part.log_start)
            lines = log_file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        for line in reversed(lines):
            if line.startswith("forq: "):
                return line.removeprefix("forq: ")
        code = part.process.returncode if part.process is not None else None
        if code is not None and code < 0:
            return f"it was killed by signal {-code} (see {path})"
        return f"{lines[-1] if lines else 'it wrote nothing'} (see {path})"


@contextlib.contextmanager
def _broker(settings: Settings) -> Iterator[EmbeddedBroker | None]:
    if not settings.uses_embedded_broker:
        yield None
        return
    broker = EmbeddedBroker(settings)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


def _is_registered(settings: Settings, part: Part) -> bool:
    pid = part.process.pid if part.process is not None else None
    return any(found["role"] == part.role and found["pid"] == pid for found in parts.running(settings))


@contextlib.contextmanager
def sole_owner(settings: Settings) -> Iterator[None]:
    """Be the only `up` of this FORQ_HOME for the time of the block. The kernel frees the lock however we die.

    Raises:
        Unavailable: another one has it.
    """
    settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(settings.run_dir / "up.lock", timeout=0):
            yield
    except Timeout:
        raise _already_up(parts.find(settings, "up")) from None


def clear_leftovers(settings: Settings) -> None:
    """Stop parts whose supervisor was killed and that the kernel could not reach (another `up` must not meet them).

    Raises:
        Unavailable: a live `up` owns this FORQ_HOME.
    """
    owner = parts.find(settings, "up")
    if owner is not None and owner["pid"] != os.getpid():
        raise _already_up(owner)
    for part in parts.running(settings):
        with contextlib.suppress(psutil.NoSuchProcess):  # it went by itself meanwhile
            process = psutil.Process(part["pid"])
            # Whoever adopts orphans (pid 1, a desktop's session), it is not the parent they had.
            if process.ppid() == part["parent"] and part["role"] != "broker":
                continue
            log.warning("leftover_stopped", part=part["role"], pid=part["pid"])
            process.terminate()
            _, alive = psutil.wait_procs([process], timeout=STOP_TIMEOUT_S)
            for stubborn in alive:
                stubborn.kill()


def _already_up(owner: dict[str, Any] | None) -> Unavailable:
    pid = f" (pid {owner['pid']})" if owner is not None else ""
    return Unavailable(f"forq is up already{pid}: `forq ps` shows it, `forq down` stops it")
