"""The command `forq watch`."""

import signal
import threading

import click

from jobs.context import open_service
from jobs.logs import configure_logs


@click.command()
def watch() -> None:
    """Watch the drop folder: files put into FORQ_HOME/inbox become jobs, their answers appear in FORQ_HOME/outbox.

    A file may have its options beside it, in FILE.job.toml. What cannot be used moves to FORQ_HOME/rejected with the
    reason in a text file.

    \b
    Example:
      forq watch
    """
    from jobs import parts
    from jobs.drop.inbox import Inbox

    configure_logs()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with open_service() as (settings, database), parts.registered(settings, "watch"):
        Inbox(settings, database).run(stop)
