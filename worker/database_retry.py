"""Waits out a database that is away for a while: work pauses with one log line and goes on."""

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
    """What a process's many loops say of the database together: one line when it goes, one when it is back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None

    def note(self, error: BaseException | None) -> None:
        with self._lock:
            if self._began is not None:
                return
            self._began = self._clock()
        log.warning("database_unreachable", reason=type(error).__name__)

    def over(self) -> None:
        """Something reached the database."""
        if self._began is None:  # nearly always, and without the lock
            return
        with self._lock:
            began, self._began = self._began, None
        if began is not None:
            log.info("database_back", after_s=round(self._clock() - began, 1))


outage = Outage()
"""The process's own: it has one database."""


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

        def note(state: RetryCallState) -> None:
            if state.outcome is not None:
                outage.note(state.outcome.exception())

        policy = Retrying(
            retry=retry_if_exception_type(cls.errors),
            wait=wait_exponential_jitter(initial=0.2, max=cls.longest_wait_s),
            stop=stop,
            before_sleep=note,
            reraise=True,
        )
        result = policy(action)
        outage.over()
        return result
