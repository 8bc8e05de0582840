"""Waits out a database that is away for a while: work pauses with one log line and goes on."""

import threading
from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

T = TypeVar("T")
log = structlog.get_logger()


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
            if state.attempt_number == 1 and state.outcome is not None:
                log.warning("database_unreachable", reason=type(state.outcome.exception()).__name__)

        policy = Retrying(
            retry=retry_if_exception_type(cls.errors),
            wait=wait_exponential_jitter(initial=0.2, max=cls.longest_wait_s),
            stop=stop,
            before_sleep=note,
            reraise=True,
        )
        return policy(action)
