"""A worker process from start to exit: register, load the engine, listen to the doorbell, drain, say why it ended."""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

import structlog
from sqlalchemy import insert, select, update
from ulid import ULID

from db.clock import db_now
from db.models import Job, Worker
from db.session import Database
from db.states import JobState
from db.upgrade import current_revision, newest_revision
from jobs import doorbell, ending, leases, parts, service
from jobs.errors import ForqError, Unavailable
from jobs.settings import Settings
from worker import broker_outage
from worker.backends import make_backend
from worker.database_retry import retrying
from worker.engine import prepare_environment
from worker.engine_thread import EngineThread
from worker.forking import load_encoder
from worker.heartbeat import Heartbeat
from worker.models import resolve_model
from worker.prompts import PromptEncoder
from worker.shards import ShardLoop

CELERY_THREADS = 64
"""Shards that may be in flight; most of them wait for room or for the tail of their rows."""
RINGS_PER_WAKE = 8
EXIT_ENGINE_DEAD = 3

log = structlog.get_logger()


class WorkerProcess:
    """One worker: one model, one engine, many shards."""

    def __init__(self, settings: Settings, model: str, worker_id: str | None = None) -> None:
        self._settings = settings
        self._model = model
        self._alias = settings.model(model)
        self._id = worker_id or str(ULID())
        self._database = Database(settings.sqlalchemy_url)
        self._substitute: threading.Thread | None = None

    def run(self) -> int:
        """Serve until told to stop. Returns the exit code.

        Raises:
            ForqError: it could not start; the database knows the reason too.
        """
        check_schema(self._database)
        signal.signal(signal.SIGTERM, _exit_early)
        self._register()
        reason: str | None = "stopped"
        try:
            with parts.registered(self._settings, "worker", worker_id=self._id, model=self._model):
                backend, encoder = self._load()
                return self._serve(backend, encoder)
        except ForqError as error:
            reason = str(error)
            raise
        except BaseException as error:
            reason = "stopped" if isinstance(error, SystemExit | KeyboardInterrupt) else type(error).__name__
            raise
        finally:
            self._leave(reason)

    def _load(self) -> tuple[EngineThread[Any], PromptEncoder]:
        if self._alias.backend == "vllm":
            prepare_environment()
        try:
            files = resolve_model(self._model, self._settings, report=lambda line: log.info("model", note=line))
        except Unavailable as error:
            self._fail_waiting_jobs(str(error))
            raise
        encoder, forking = load_encoder(self._alias, files.path)
        log.info("engine_starting", model=self._model, path=files.source, forks=forking is not None)
        backend = make_backend(self._alias, str(files.path), forking)
        backend.start()
        facts = backend.facts
        log.info("engine_ready", blocks=facts.num_blocks, block_size=facts.block_size, context=facts.max_model_len)
        return backend, encoder

    def _serve(self, backend: EngineThread[Any], encoder: PromptEncoder) -> int:
        from celery.signals import worker_ready, worker_shutting_down

        loop = ShardLoop(self._database, self._settings, self._id, self._model, backend, encoder)
        heartbeat = Heartbeat(self._database, self._settings, self._id, self._model, loop, lambda: self._wake(loop))
        facts = backend.facts
        self._update(state="ready", engine={name: getattr(facts, name) for name in facts.__slots__})

        def drain(**_: Any) -> None:
            # Stopped first: the database may be away, and then it makes us wait.
            loop.control.stop(self._settings.queue.drain_s)
            log.info("draining", seconds=self._settings.queue.drain_s)
            with suppress(*retrying.errors):
                self._update(state="draining")

        def listening(**_: Any) -> None:
            log.info("worker_listening", model=self._model, worker_id=self._id)

        worker_shutting_down.connect(drain, weak=False)
        worker_ready.connect(listening, weak=False)
        threading.Thread(target=self._watch_engine, args=(backend,), name="engine-watch", daemon=True).start()
        heartbeat.start()
        celery_worker = _celery_worker(self._settings, self._model, self._id, loop)
        try:
            celery_worker.start()
        finally:
            loop.control.stop(0)
            if self._substitute is not None:
                self._substitute.join(timeout=10)
            heartbeat.stop()
            backend.shutdown()
        if backend.failure is not None:
            self._die(backend.failure)
        return int(celery_worker.exitcode or 0)

    def _wake(self, loop: ShardLoop) -> None:
        """Ring our own bell; with no broker to carry it, run the shards here, one at a time, until it is back."""
        error = doorbell.try_to_ring(self._settings, self._model, RINGS_PER_WAKE)
        if error is None:
            broker_outage.outage.over(broker_outage.RINGING)
            return
        broker_outage.outage.note(broker_outage.RINGING, error)
        if self._substitute is None or not self._substitute.is_alive():
            self._substitute = threading.Thread(target=loop.run_available, name="shards-without-broker", daemon=True)
            self._substitute.start()

    def _watch_engine(self, backend: EngineThread[Any]) -> None:
        while not backend.wait_dead(timeout_s=3600):
            pass
        self._die(backend.failure or "unknown")

    def _die(self, reason: str) -> NoReturn:
        """The engine is gone: hand everything back at once and leave, without waiting for threads that wait for it."""
        try:
            num_shards = leases.release_all(self._database, self._id, crashed=True)
            self._leave(f"engine died: {reason}")
            log.error("worker_exits", reason=reason, shards_released=num_shards)
        finally:
            sys.stderr.flush()
            os._exit(EXIT_ENGINE_DEAD)

    def _register(self) -> None:
        with self._database.write() as connection:
            connection.execute(
                insert(Worker).values(
                    id=self._id,
                    model=self._model,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    state="starting",
                    started_at=db_now(),
                    heartbeat_at=db_now(),
                )
            )

    def _update(self, **values: Any) -> None:
        with self._database.write() as connection:
            connection.execute(update(Worker).where(Worker.id == self._id).values(heartbeat_at=db_now(), **values))

    def _leave(self, reason: str | None) -> None:
        try:
            leases.release_all(self._database, self._id, crashed=False)
            self._update(state="exited", exited_at=db_now(), exit_reason=reason)
        except Exception as error:  # the reason is already on its way to the user; leases expire by themselves
            log.warning("exit_not_recorded", reason=type(error).__name__)

    def _fail_waiting_jobs(self, reason: str) -> None:
        """Without its model no job of it can run at all: say so now, unless another worker serves it."""
        others = [w for w in service.workers(self._database) if w["model"] == self._model and w["id"] != self._id]
        if others:
            return
        with self._database.read() as connection:
            jobs = connection.scalars(
                select(Job.id).where(Job.model == self._model, Job.state == JobState.QUEUED)
            ).all()
        for job_id in jobs:
            ending.fail_job(self._database, job_id, reason)


def check_schema(database: Database) -> None:
    """Raises Unavailable: if the database is not at this version's schema."""
    current, newest = current_revision(database), newest_revision()
    if current != newest:
        raise Unavailable(
            f"the database is at revision {current or 'none'}, this version needs {newest}: forq db upgrade"
        )


def _celery_worker(settings: Settings, model: str, worker_id: str, loop: ShardLoop) -> Any:
    app = doorbell.make_app(settings.celery_broker_url)

    @app.task(name=doorbell.TASK_NAME, ignore_result=True)  # type: ignore[untyped-decorator]
    def run_shards(rung_for: str) -> None:
        """A bell rang: run whatever is there. The message says nothing more, so losing or doubling it is harmless."""
        assert rung_for == model, "one queue per model"
        loop.run_available()

    app.finalize()
    broker_outage.watch(app)
    return app.Worker(
        hostname=f"forq-{worker_id}",
        pool="threads",
        concurrency=CELERY_THREADS,
        queues=[doorbell.queue_name(model)],
        loglevel="WARNING",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        optimization="fair",
    )


def _exit_early(*_: Any) -> NoReturn:
    """SIGTERM while the engine loads; Celery puts its own handler in place afterwards."""
    raise SystemExit(0)
