"""Logs: one line per change of state, to stderr, with identifiers and counts, never with a prompt.

Nor with the text of an exception that nobody foresaw: libraries quote what they choke on, database drivers their
parameters. Its type and its place are what is needed to find the fault.
"""

import logging
import sys
import traceback
from typing import Any

import structlog

MAX_FRAMES = 8


def configure_logs(level: int = logging.INFO) -> None:
    """Lines for a person on a terminal, JSON otherwise. Libraries' own logs pass only from warnings up."""
    terminal = sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _place_instead_of_text,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Looked up at each line: whoever replaced or closed stderr meanwhile must not break the logging.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


def place_of(error: BaseException) -> str:
    """Where it was raised, innermost first: files, lines and functions, without any value."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def _place_instead_of_text(_logger: Any, _method: str, event: Any) -> Any:
    """What `log.exception` and `exc_info=True` add to a line."""
    said = event.pop("exc_info", None)
    if said is True:
        said = sys.exc_info()[1]
    elif isinstance(said, tuple):
        said = said[1]
    if isinstance(said, BaseException):
        event["error"], event["where"] = type(said).__name__, place_of(said)
    return event
