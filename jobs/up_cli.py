"""The commands for this machine: up, down, ps."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import click

from jobs.console import print_json, print_table
from jobs.context import open_service

DETACH_TIMEOUT_S = 960.0
DOWN_TIMEOUT_S = 120.0


@click.command()
@click.option("--detach", is_flag=True, help="Return once all parts are ready.")
@click.option("--model", metavar="ALIAS", help="Which configured model to serve.  [default: the configured default]")
def up(detach: bool, model: str | None) -> int:
    """Run everything on this machine: database, broker, one worker, API, drop folder.

    In the foreground until Ctrl-C, which lets running rows finish and leaves nothing running; a second Ctrl-C does not
    wait. Logs are in FORQ_HOME/logs.

    \b
    Example:
      forq up --detach
    """
    from db.upgrade import upgrade
    from jobs.binding import check_bind, local_url
    from jobs.logs import configure_logs
    from jobs.settings import get_settings
    from jobs.supervisor import Supervisor, clear_leftovers, sole_owner

    settings = get_settings()
    model = model or settings.default_model
    settings.model(model)
    if detach:
        clear_leftovers(settings)
        return _detach(model)
    configure_logs()
    with sole_owner(settings):
        clear_leftovers(settings)
        upgrade(settings.sqlalchemy_url)
        with open_service() as (_, database):
            check_bind(settings, database, settings.api_host)  # now, not after the model has been loaded
            return Supervisor(settings, model, database).run(
                lambda: click.echo(f"forq is up: {local_url(settings)}", err=True)
            )


def _detach(model: str) -> int:
    """Start `up` again in a session of its own, and wait until it says that it is ready."""
    from jobs.binding import local_url
    from jobs.settings import get_settings

    settings = get_settings()
    path = settings.home / "logs" / "up.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = path.stat().st_size if path.exists() else 0
    with path.open("ab") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "up", "--model", model],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
    deadline = time.monotonic() + DETACH_TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            with path.open("rb") as reader:
                reader.seek(start)
                said = reader.read().decode(errors="replace")
            if "forq is up:" in said:
                click.echo(f"forq is up (pid {process.pid}): {local_url(settings)}")
                return 0
            if process.poll() is not None:
                faults = [line for line in said.splitlines() if line.startswith("forq: ")]
                click.echo(faults[-1] if faults else f"forq: it did not start: see {path}", err=True)
                return 1
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait(DOWN_TIMEOUT_S)
        raise
    process.send_signal(signal.SIGTERM)
    click.echo(f"forq: not ready after {DETACH_TIMEOUT_S:.0f} s: see {path}", err=True)
    return 1


@click.command()
def down() -> int:
    """Stop what `up` runs on this machine: running rows finish, the rest waits for the next start.

    \b
    Example:
      forq down
    """
    from jobs import parts
    from jobs.settings import get_settings
    from jobs.supervisor import clear_leftovers

    settings = get_settings()
    owner = parts.find(settings, "up")
    if owner is None:
        clear_leftovers(settings)
        click.echo("forq is not up")
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(owner["pid"], signal.SIGTERM)
    timeout_s = settings.queue.drain_s + DOWN_TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    while parts.is_alive(owner):
        if time.monotonic() >= deadline:
            click.echo(f"forq: pid {owner['pid']} has not stopped after {timeout_s:.0f} s: see its log", err=True)
            return 1
        time.sleep(0.1)
    click.echo("forq is down")
    return 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ps(as_json: bool) -> None:
    """List the running parts: those of this machine with their pids, and the workers of every machine.

    \b
    Example:
      forq ps --json
    """
    from jobs import parts, service

    with open_service() as (settings, database):
        found = [{"part": part["role"], **_without(part, "role", "parent")} for part in parts.running(settings)]
        workers = {row["id"]: row for row in service.workers(database)}
    for part in found:
        row = workers.pop(part.get("worker_id"), None)
        if row is not None:
            part.update(state=row["state"], host=row["host"], engine=row["engine"])
    for row in workers.values():  # on other machines
        found.append({"part": "worker", "pid": row["pid"], "worker_id": row["id"], **_without(row, "id", "pid")})
    if as_json:
        print_json(found)
        return
    rows = [[part["part"], part["pid"], part.get("state"), part.get("model"), part.get("host")] for part in found]
    print_table(None, ["part", "pid", "state", "model", "host"], rows)


def _without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in names}
