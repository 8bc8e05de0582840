"""Logs: one line per change of state, to stderr, with identifiers and counts, never with a prompt."""

import logging
import sys

import structlog


def configure_logs(level: int = logging.INFO) -> None:
    """Lines for a person on a terminal, JSON otherwise. Libraries' own logs pass only from warnings up."""
    terminal = sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Looked up at each line: whoever replaced or closed stderr meanwhile must not break the logging.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
