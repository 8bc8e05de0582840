"""The command `forq worker`."""

import sys

import click

from jobs.logs import configure_logs
from jobs.settings import Settings, get_settings


@click.command()
@click.option("--model", metavar="ALIAS", help="Which configured model to serve.  [default: the configured default]")
@click.option("--id", "worker_id", hidden=True, help="The supervisor's name for this process.")
def worker(model: str | None, worker_id: str | None) -> None:
    """Run one worker: one engine for one model, until Ctrl-C.

    It leases shards of that model's jobs from the database and writes their answers. Start as many as there are
    GPUs, on as many machines as can reach the database and the broker. On Ctrl-C or SIGTERM it takes no more work, lets
    running rows finish for `queue.drain_s` seconds, and gives the rest back.

    \b
    Example:
      forq worker --model smollm2-135m
    """
    settings: Settings = get_settings()
    configure_logs()
    from worker.runtime import WorkerProcess

    sys.exit(WorkerProcess(settings, model or settings.default_model, worker_id).run())
