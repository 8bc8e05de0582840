"""The commands `forq purge` and `forq doctor`."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from jobs.ages import age_s
from jobs.console import print_json, progress, without_controls
from jobs.context import open_service
from jobs.job_cli import json_option

if TYPE_CHECKING:
    from jobs.upkeep.checks import Found


@click.command()
@click.option("--older-than", "older_than_s", required=True, metavar="AGE", callback=age_s,
              help="How long ago a job must have ended: 30d, 12h, or ISO 8601 (P30D).")  # fmt: skip
@click.option("--job", "jobs", multiple=True, metavar="ID",
              help="Only this job; may be given again. Refused where it has not ended so long ago.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--vacuum", is_flag=True,
              help="Shrink the SQLite file afterwards; needs free disk for twice what is left in it.")  # fmt: skip
@json_option
def purge(older_than_s: float, jobs: tuple[str, ...], dry_run: bool, vacuum: bool, as_json: bool) -> None:
    """Delete jobs that ended long ago, with their rows, answers and submitted files. Export what you need first.

    Jobs that have not ended are never touched. Batches of the API go with their jobs, output files included. Submitted
    files that no job names, expired files of the API, workers that ended and events of
    webhooks that were sent before the limit, and what killed processes left half-written go too; files only when older
    than an hour.

    \b
    Example:
      forq purge --older-than 30d --dry-run
    """
    from jobs.errors import Unavailable
    from jobs.upkeep import space
    from jobs.upkeep.purge import purge as run

    fault = None
    with open_service() as (settings, database), progress() as advance:
        if vacuum:
            space.check_backend(database)
        ids = [job.strip().upper() for job in jobs]
        value: dict[str, Any] = asdict(run(database, settings, older_than_s, ids, dry_run=dry_run, progress=advance))
        value["disk_bytes"] = None
        if vacuum and not dry_run:
            try:
                value["disk_bytes"] = space.vacuum(database)
            except Unavailable as error:  # what was purged is to be said all the same
                fault = error
        value["database_free_bytes"] = space.free_bytes(database) if database.is_sqlite else None
    print_json(value) if as_json else _print_purged(value)
    if fault is not None:
        raise fault


def _print_purged(value: dict[str, Any]) -> None:
    verb = "would delete" if value["dry_run"] else "deleted"
    click.echo(f"{verb} {value['jobs']} jobs: {value['rows']} rows, {value['answers']} answers")
    click.echo(f"{verb} {value['files']} submitted files: {value['file_bytes']:,} bytes")
    if value["batches"]:
        click.echo(f"{verb} {value['batches']} batches of the API, with their output")
    click.echo(f"{verb} {value['temporaries']} half-written files: {value['temporary_bytes']:,} bytes")
    click.echo(f"{verb} {value['workers']} records of ended workers")
    click.echo(f"{verb} {value['webhook_events']} events of webhooks")
    if value["skipped"]:
        click.echo(f"left {value['skipped']} jobs that were retried, or purged by another, meanwhile")
    if value["disk_bytes"] is not None:
        click.echo(f"the database file is {value['disk_bytes']:,} bytes smaller")
    elif value["database_free_bytes"] and not value["dry_run"]:
        click.echo(f"{value['database_free_bytes']:,} bytes of the database file are free for new rows; "
                   "--vacuum gives them to the disk")  # fmt: skip


@click.command()
@click.option("--repair", is_flag=True, help="Do what the service would do by itself, now; nothing else is changed.")
@json_option
def doctor(repair: bool, as_json: bool) -> int:
    """Check that what is stored agrees: schema, rows, counters, answers, trees, leases, workers, events, files.

    One line per finding: what, how many, an example, and the remedy. Exit code 1 where something is found and not
    repaired. It reads everything once, beside the running service, and changes nothing without --repair.

    \b
    Example:
      forq doctor --repair
    """
    from jobs.upkeep.doctor import examine

    show = _show if shows_checks() else _say_nothing
    with open_service() as (settings, database):
        report = examine(database, settings, repair=repair, show=show)
    if as_json:
        print_json(report.as_dict())
    else:
        for finding in report.findings:
            click.echo(without_controls(finding.line))  # a file's or a host's name may hold anything
        click.echo(report.summary)
    return 0 if report.is_healthy else 1


def shows_checks() -> bool:
    return sys.stderr.isatty()


def _show(name: str, found: "Found | None", seconds: float) -> None:
    """Each check as it runs: its name before, what came of it on the same line."""
    if found is None:
        click.echo(f"{name} … ", err=True, nl=False)
    else:
        click.echo(f"{f'{found.num} found' if found.num else 'ok'} ({seconds:.1f} s)", err=True)


def _say_nothing(name: str, found: "Found | None", seconds: float) -> None:
    pass
