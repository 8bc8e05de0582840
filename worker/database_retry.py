"""Waits out a database that is away for a while: work pauses with one log line and goes on."""

import sqlite3
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

T = TypeVar("T")
log = structlog.get_logger()


class Outage:
    """What a process's many loops say of database or broker together: one line when it goes, one when it is back.

    It is back when everybody whom it had failed has been served: on a full disk small writes succeed beside large ones
    that do not, and reads always.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, of: str = "database") -> None:
        self._clock = clock
        self._of = of
        self._lock = threading.Lock()
        self._began: float | None = None
        self._failed: set[object] = set()

    def note(self, who: object, error: BaseException | None) -> None:
        with self._lock:
            self._failed.add(who)
            if self._began is not None:
                return
            self._began = self._clock()
        log.warning(f"{self._of}_unreachable", reason=reason_of(error))

    def over(self, who: object) -> None:
        """It has done what it was asked for, or nobody asks for that any more."""
        if self._began is None:  # nearly always, and without the lock
            return
        with self._lock:
            self._failed.discard(who)
            if self._failed or self._began is None:
                return
            began, self._began = self._began, None
        log.info(f"{self._of}_back", after_s=round(self._clock() - began, 1))


def reason_of(error: BaseException | None) -> str:
    """For the log: SQLite's text, which holds no value and no name; of other drivers the kind, as in DiskFull."""
    cause = getattr(error, "orig", None) or error
    return str(cause) if isinstance(cause, sqlite3.Error) else type(cause).__name__


outage = Outage()
"""The process's own: it has one database."""
LEASING, PULSE = "leasing", "pulse"
"""Who may be failed by it for long, beside the calls of `retrying`."""


class retrying:
    """Retries what a database outage interrupted. Safe for fenced writes only: a commit whose answer was lost is found
    out by the fence or by the rows' states, and never stored twice."""

    errors = (OperationalError, InterfaceError)
    longest_wait_s = 5.0

    @classmethod
    def call(cls, stopping: threading.Event, action: Callable[[], T]) -> T:
        """Run `action` until it succeeds; gives up with the database's error once the worker is stopping."""

        def stop(_: RetryCallState) -> bool:
            return stopping.is_set()

        call = object()

        def note(state: RetryCallState) -> None:
            if state.outcome is not None:
                outage.note(call, state.outcome.exception())

        policy = Retrying(
            retry=retry_if_exception_type(cls.errors),
            wait=wait_exponential_jitter(initial=0.2, max=cls.longest_wait_s),
            stop=stop,
            before_sleep=note,
            reraise=True,
        )
        try:
            return policy(action)
        finally:
            outage.over(call)
