"""The commands `forq webhooks add`, `list`, `rotate`, `remove`, `test`, `deliveries` and `send`."""

from typing import Any

import click

from db.models import DEFAULT_TENANT
from jobs.ages import age_s
from jobs.console import print_json, print_table, without_controls
from jobs.context import open_service
from jobs.job_cli import json_option

# Written out: no enumeration is imported before a command runs. A test compares them.
EVENTS = ("job.running", "job.completed", "job.failed", "job.cancelled")
STATES = ("pending", "delivered", "failed")

_id_argument = click.argument("webhook_id", metavar="ID", callback=lambda ctx, param, value: value.strip().upper())


@click.group()
def webhooks() -> None:
    """Tell other services, over HTTP and signed, when jobs change their state.

    \b
    Example:
      forq webhooks add https://hooks.example.com/forq
    """


@webhooks.command()
@click.argument("url")
@click.option("--events", metavar="LIST", default=",".join(EVENTS), help="Of which changes, separated by commas.  "
              "[default: job.running,job.completed,job.failed,job.cancelled]")  # fmt: skip
@click.option("--tenant", metavar="T", default=DEFAULT_TENANT, show_default=True, help="Whose jobs.")
@click.option("--named-only", is_flag=True, help="Only of jobs that name it: `forq submit --webhook URL`.")
@json_option
def add(url: str, events: str, tenant: str, named_only: bool, as_json: bool) -> None:
    """Add a webhook and print the secret that signs what it is sent, this once.

    URL must lie in webhooks.allow. The secret goes to standard output, what is to be said about it to standard error.

    \b
    Example:
      forq webhooks add https://hooks.example.com/forq --events job.completed,job.failed
    """
    from jobs.webhooks import registry

    said = [event.strip() for event in events.split(",")]
    with open_service() as (settings, database):
        described, secret = registry.add(database, settings, url, said, tenant=tenant, every_job=not named_only)
    _print_secret(described, secret, as_json)


@webhooks.command(name="list")
@click.option("--tenant", metavar="T", help="Only this tenant's.")
@json_option
def list_(tenant: str | None, as_json: bool) -> None:
    """List the webhooks, without their secrets.

    \b
    Example:
      forq webhooks list --json
    """
    from jobs.webhooks import registry

    with open_service() as (_, database):
        found = registry.list_webhooks(database, tenant)
    if as_json:
        print_json(found)
        return
    columns = ["id", "tenant", "state", "pending", "jobs", "events", "url"]
    print_table(None, columns, [_row(webhook) for webhook in found])


@webhooks.command()
@_id_argument
@click.option("--overlap", "overlap_s", metavar="AGE", callback=age_s,
              help="How long the old secret signs, too: 12h, 7d, or ISO 8601.  [default: 1d]")  # fmt: skip
@click.option("--at-once", is_flag=True, help="The old secret signs nothing more: it is known to others.")
@json_option
def rotate(webhook_id: str, overlap_s: float | None, at_once: bool, as_json: bool) -> None:
    """Give a webhook a new secret and print it; for a while deliveries carry a signature of each.

    \b
    Example:
      forq webhooks rotate 01JDQXK8V0E3M5T9ZB4W6Y7N2A --overlap 2d
    """
    from jobs.webhooks import registry

    if at_once and overlap_s is not None:
        raise click.UsageError("give --overlap or --at-once, not both")
    overlap_s = 0.0 if at_once else registry.OVERLAP_S if overlap_s is None else overlap_s
    with open_service() as (_, database):
        described, secret = registry.rotate(database, webhook_id, overlap_s=overlap_s)
    _print_secret(described, secret, as_json)


@webhooks.command()
@_id_argument
@json_option
def remove(webhook_id: str, as_json: bool) -> None:
    """Remove a webhook; what it was still to be told is forgotten.

    \b
    Example:
      forq webhooks remove 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    from jobs.webhooks import registry

    with open_service() as (_, database):
        described = registry.remove(database, webhook_id)
    if as_json:
        print_json(described)
    else:
        click.echo(f"webhook {described['id']} is removed; {described['num_pending']} events were still to be sent")


@webhooks.command()
@_id_argument
@json_option
def test(webhook_id: str, as_json: bool) -> int:
    """Send a signed `ping` from here, now, and print what came of it; exit code 1 unless it was taken.

    \b
    Example:
      forq webhooks test 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    import asyncio

    from jobs.webhooks import registry
    from jobs.webhooks.pinging import send_ping

    with open_service() as (settings, database):
        keys = registry.signing_keys(database, webhook_id)
        event_id, outcome = asyncio.run(send_ping(settings.webhooks, keys, webhook_id))
    if as_json:
        print_json({"event_id": event_id, "delivered": outcome.is_delivered, "status": outcome.status,
                    "error": outcome.error})  # fmt: skip
    else:
        click.echo(f"taken: it answered {outcome.status}" if outcome.is_delivered else f"not taken: {outcome.error}")
    return 0 if outcome.is_delivered else 1


@webhooks.command()
@click.option("--webhook", "webhook_id", metavar="ID", help="Only to this one.")
@click.option("--job", "job_id", metavar="JOB", help="Only of this job.")
@click.option("--state", type=click.Choice(STATES), help="Only those in this state; failed: given up.")
@click.option("--limit", type=int, default=50, show_default=True, metavar="N", help="How many.")
@json_option
def deliveries(webhook_id: str | None, job_id: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List what was sent or is to be sent, newest first, with attempts and the last error.

    \b
    Example:
      forq webhooks deliveries --state failed
    """
    from jobs.webhooks.deliveries import list_deliveries

    ids = {name: value.strip().upper() for name, value in (("webhook_id", webhook_id), ("job_id", job_id)) if value}
    with open_service() as (_, database):
        found = list_deliveries(database, state=state, limit=limit, **ids)
    if as_json:
        print_json(found)
        return
    columns = ["event", "type", "job", "webhook", "state", "attempts", "status", "next (UTC)", "error"]
    print_table(None, columns, [_delivery_row(delivery) for delivery in found])


@webhooks.command()
def send() -> None:
    """Send what is due until told to stop; `forq up` runs it where webhooks.allow is not empty.

    Any number of senders may share a database: each event is claimed by one.

    \b
    Example:
      forq webhooks send
    """
    import asyncio
    import signal

    from jobs import parts
    from jobs.errors import BadInput
    from jobs.logs import configure_logs
    from jobs.webhooks.sender import Sender

    configure_logs()

    async def run(database: Any, settings: Any) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        with parts.registered(settings, "webhooks"):
            await Sender(database, settings).run(stop)

    with open_service() as (settings, database):
        if not settings.webhooks.allow:
            raise BadInput("webhooks.allow is empty, so there is nothing to send: list where webhooks may point")
        asyncio.run(run(database, settings))


def _print_secret(described: dict[str, Any], secret: str, as_json: bool) -> None:
    if as_json:
        print_json({**described, "secret": secret})
        return
    click.echo(f"webhook {described['id']}: {', '.join(described['events'])}, tenant {described['tenant']}", err=True)
    click.echo("its secret; keep it now, it is not shown again:", err=True)
    click.echo(secret)


def _row(webhook: dict[str, Any]) -> list[Any]:
    events = " ".join(event.removeprefix("job.") for event in webhook["events"])
    jobs = "all" if webhook["every_job"] else "named"
    return [webhook["id"], webhook["tenant"], webhook["state"], webhook["num_pending"], jobs, events, webhook["url"]]


def _delivery_row(delivery: dict[str, Any]) -> list[Any]:
    names = ("event_id", "type", "job_id", "webhook_id", "state", "attempts", "last_status")
    error = without_controls(delivery["last_error"] or "")
    return [*(delivery[name] for name in names), (delivery["next_attempt_at"] or "")[:19], error]
