"""One line when the broker goes and one when it is back, in place of what Celery says of it: a traceback at the loss,
another for each message in hand ("Couldn't ack"), a line for every try to connect."""

import logging
from typing import Any

from worker.database_retry import Outage

RINGING, LISTENING = "ringing", "listening"
_LOGGERS = ("celery.worker", "kombu")

outage = Outage(of="broker")
"""The process's own: it has one broker."""


class _Quiet(logging.Filter):
    """Takes out what Celery and kombu say of a lost connection, and notes it."""

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._errors = errors

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "py.warnings":  # of a setting that is about late acknowledgement, which we do not use
            return "on_connection_loss" not in record.getMessage()
        if not record.name.startswith(_LOGGERS):
            return True
        error = record.exc_info[1] if record.exc_info else None
        values = record.args.values() if isinstance(record.args, dict) else record.args or ()
        error = error or next((value for value in values if isinstance(value, BaseException)), None)
        if not isinstance(error, self._errors) and "Cannot connect" not in str(record.msg):
            return True
        if "ack" not in str(record.msg):  # which may come when the consumer has long connected anew
            outage.note(LISTENING, error or ConnectionError())
        return False


def watch(app: Any) -> None:
    """Let a Celery application's worker speak of its broker in our two lines; before its worker is made."""
    from celery import bootsteps

    connection = app.connection_for_read()
    quiet = _Quiet((OSError, *connection.connection_errors, *connection.channel_errors))
    for handler in logging.getLogger().handlers:
        handler.addFilter(quiet)

    class Listening(bootsteps.StartStopStep):  # type: ignore[misc]
        """Started each time the consumer has connected and listens."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:
            outage.over(LISTENING)

    app.steps["consumer"].add(Listening)
