"""The commands `forq keys create`, `list` and `revoke`."""

from typing import Any

import click

from db.models import DEFAULT_TENANT
from jobs.ages import age_s
from jobs.console import print_json, print_table, without_controls
from jobs.context import open_service
from jobs.job_cli import json_option

# Written out: the enumeration of jobs/keys.py is not imported before a command runs. A test compares them.
SCOPES = ("submit", "read", "admin")


@click.group()
def keys() -> None:
    """Manage the keys of the REST API.

    \b
    Example:
      forq keys create ci --scope submit --scope read
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    help="What it may do; may be given again. submit: create, cancel, retry jobs; read: status, lists, results; "
    "admin: both, for every tenant's jobs.",
)
@click.option("--tenant", metavar="T", default=DEFAULT_TENANT, show_default=True,
              help="Whose jobs it sees and makes; no other tenant's key sees them.")  # fmt: skip
@click.option("--expires", "expires_s", metavar="AGE", callback=age_s,
              help="How long it is good: 90d, 12h, or ISO 8601 (P90D).  [default: until it is revoked]")  # fmt: skip
@click.option("--rate", "rate_per_minute", type=int, metavar="N",
              help="Requests per minute.  [default: api.rate_per_minute]")  # fmt: skip
@json_option
def create(
    name: str, scopes: tuple[str, ...], tenant: str, expires_s: float | None, rate_per_minute: int | None, as_json: bool
) -> None:
    """Make a key and print it, this once: only its hash is stored.

    The key goes to standard output, what is to be said about it to standard error. From the first key on, the API asks
    for one, on loopback too, unless api.require_keys is false.

    \b
    Example:
      forq keys create nightly --scope submit --scope read --tenant data-team --expires 90d
    """
    from jobs import keys as store

    with open_service() as (_, database):
        described, key = store.create(
            database, name, scopes, tenant=tenant, expires_s=expires_s, rate_per_minute=rate_per_minute
        )
    if as_json:
        print_json({**described, "key": key})
        return
    ends = f"until {described['expires_at'][:19]} UTC" if described["expires_at"] else "until it is revoked"
    click.echo(f"key {described['id']}: {', '.join(described['scopes'])}, tenant {tenant}, {ends}", err=True)
    click.echo("keep it now, it is not shown again:", err=True)
    click.echo(key)


@keys.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the keys there ever were, without their secrets.

    \b
    Example:
      forq keys list --json
    """
    from jobs import keys as store

    with open_service() as (_, database):
        found = store.list_keys(database)
    if as_json:
        print_json(found)
        return
    columns = ["id", "name", "tenant", "scopes", "state", "expires (UTC)", "last used (UTC)"]
    print_table(None, columns, [_row(key) for key in found])


@keys.command()
@click.argument("key_id", metavar="ID", callback=lambda ctx, param, value: value.strip().upper())
@json_option
def revoke(key_id: str, as_json: bool) -> None:
    """End a key for good: the next request with it is refused.

    \b
    Example:
      forq keys revoke 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    from jobs import keys as store

    with open_service() as (_, database):
        described = store.revoke(database, key_id)
    if as_json:
        print_json(described)
    else:
        click.echo(f"key {described['id']} ({without_controls(described['name'])}) is revoked")


def _row(key: dict[str, Any]) -> list[Any]:
    times = [(key[name] or "")[:19] for name in ("expires_at", "last_used_at")]
    return [key["id"], without_controls(key["name"]), key["tenant"], " ".join(key["scopes"]), key["state"], *times]
