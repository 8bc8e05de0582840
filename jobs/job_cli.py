"""The commands about jobs: submit, status, wait, list, cancel, retry."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from jobs.console import Advance, print_json, print_table, progress
from jobs.context import open_service
from jobs.input_options import input_options, read_templates
from jobs.remote.location import Location

POLL_S = 0.5
ENDED = ("completed", "failed", "cancelled")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _not_negative(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not value >= 0:  # NaN too: it would wait for ever
        raise click.BadParameter(f"{value} is no time to wait: give 0 or more seconds", ctx, param)
    return value


job_argument = click.argument("job", metavar="JOB", callback=lambda ctx, param, value: value.strip().upper())


@click.command()
@input_options
@click.option(
    "--decoding",
    metavar="NAME",
    default="ar",
    show_default=True,
    help="ar: one token after the other; apar: the model forks its answers. On models with the reference backend also "
    "medusa, ptd, lade, which draft, and apar+medusa, apar+ptd, apar+lade, which do both.",
)
@click.option("--temperature", type=float, metavar="F", help="0 is greedy.  [default: 1]")
@click.option("--top-p", type=float, metavar="F", help="Nucleus sampling.  [default: 1]")
@click.option(
    "--seed", type=int, metavar="N", help="Makes sampling repeatable; every row gets a seed of its own from it."
)
@click.option("--n", type=int, metavar="N", help="Answers per row.  [default: 1]")
@click.option("--priority", type=int, metavar="P", default=0, help="Higher goes first; waiting counts too.")
@click.option(
    "--kv-share",
    type=float,
    metavar="F",
    help="Part of the KV budget the job may hold while other jobs wait, above 0 to 1.  [default: 1]",
)
@click.option("--name", metavar="S", help="A name for the job.")
@click.option("--webhook", metavar="URL", help="Tell this webhook of `forq webhooks add` how the job goes.")
@click.option("--wait", "wait_for_end", is_flag=True, help="Wait until the job has ended.")
@json_option
def submit(
    file: Location,
    template: Path | None,
    system: Path | None,
    turn: tuple[Path, ...],
    wait_for_end: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Submit FILE, Parquet or OpenAI batch JSONL, as a job.

    FILE may be a URL (s3://, gs://, file://) under one of storage.roots.

    Each row becomes one request. A row's own `sampling` struct column overrides the flags. Rows that cannot be asked
    end with an error; all others are answered.

    \b
    Example:
      forq submit questions.parquet --prompt-column prompt --max-tokens 128 --wait
    """
    from jobs import doorbell
    from jobs.remote.files import input_file
    from jobs.submit import SubmitOptions, check_options, submit_file

    names = ("max_tokens", "temperature", "top_p", "seed", "n")
    sampling = {name: options.pop(name) for name in names}
    with open_service() as (settings, database):
        model = options.pop("model") or settings.default_model
        submit_options = SubmitOptions(
            model=model,
            **read_templates(template, system, turn),
            sampling={name: value for name, value in sampling.items() if value is not None},
            **options,
        )
        check_options(settings, submit_options)  # before anything is fetched
        with progress() as advance, input_file(settings, file, advance) as path:
            submitted = submit_file(database, settings, path, submit_options, advance)
        doorbell.ring(settings, model, submitted.num_shards)
        if as_json:
            print_json({"job_id": submitted.job_id})
        else:
            refused = f", {submitted.num_refused} refused" if submitted.num_refused else ""
            click.echo(f"job {submitted.job_id}: {submitted.num_rows} rows{refused}")
        if wait_for_end:
            state = wait_until_ended(database, submitted.job_id, None)["state"]
            return 0 if state == "completed" else 1
    return 0


@click.command()
@job_argument
@click.option("--watch", is_flag=True, help="Go on until the job has ended.")
@json_option
def status(job: str, watch: bool, as_json: bool) -> int:
    """Show one job's state and counts.

    \b
    Example:
      forq status 01JDQXK8V0E3M5T9ZB4W6Y7N2A --json
    """
    from jobs import service

    with open_service() as (_, database):
        if watch:
            wait_until_ended(database, job, None)
        value = service.job_status(database, job)
    print_json(value) if as_json else _print_status(value)
    return 1 if value["state"] == "failed" else 0


@click.command()
@job_argument
@click.option("--timeout", type=float, metavar="S", callback=_not_negative,
              help="Give up after S seconds (exit code 1).")  # fmt: skip
@json_option
def wait(job: str, timeout: float | None, as_json: bool) -> int:
    """Wait until a job has ended; exit code 0 only if it completed.

    \b
    Example:
      forq wait 01JDQXK8V0E3M5T9ZB4W6Y7N2A --timeout 600
    """
    with open_service() as (_, database):
        value = wait_until_ended(database, job, timeout)
    print_json(value) if as_json else _print_status(value)
    if value["state"] not in ENDED:
        click.echo(f"forq: still {value['state']} after {timeout} s: wait longer, or look at `forq ps`", err=True)
    return 0 if value["state"] == "completed" else 1


@click.command(name="list")
@click.option("--limit", type=int, default=50, show_default=True, metavar="N", help="How many.")
@click.option("--state", metavar="STATE", help="Only jobs in this state.")
@click.option("--tenant", metavar="T", help="Only this tenant's jobs.")
@json_option
def list_(limit: int, state: str | None, tenant: str | None, as_json: bool) -> None:
    """List jobs, newest first.

    \b
    Example:
      forq list --state running
    """
    from jobs import service

    with open_service() as (_, database):
        jobs = service.list_jobs(database, limit=limit, state=state, tenant=tenant)
    if as_json:
        print_json(jobs)
        return
    rows = [
        [job["job_id"], job["name"], job["state"], job["model"], _count_text(job["counts"]), job["created_at"][:19]]
        for job in jobs
    ]
    print_table(None, ["job", "name", "state", "model", "rows", "created (UTC)"], rows)


@click.command()
@job_argument
@json_option
def cancel(job: str, as_json: bool) -> None:
    """Stop a job; rows that have finished keep their answers.

    \b
    Example:
      forq cancel 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    from jobs import ending, service

    with open_service() as (_, database):
        ending.cancel(database, job)
        value = service.job_status(database, job)
    print_json(value) if as_json else _print_status(value)


@click.command()
@job_argument
@json_option
def retry(job: str, as_json: bool) -> None:
    """Run a job's failed rows again; all others stay as they are.

    \b
    Example:
      forq retry 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    from jobs import doorbell, ending, service

    with open_service() as (settings, database):
        num_rows = ending.retry(database, job)
        value = service.job_status(database, job)
        doorbell.ring(settings, value["model"], doorbell.MAX_RINGS)
    if as_json:
        print_json({**value, "retried": num_rows})
    else:
        click.echo(f"{num_rows} rows are queued again")
        _print_status(value)


def wait_until_ended(database: Any, job_id: str, timeout_s: float | None) -> dict[str, Any]:
    """The job's status when it has ended, or when the time is over; progress and its trouble go to stderr."""
    from jobs import service

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shown_error = None
    with progress() as advance:
        while True:
            value = service.job_status(database, job_id)
            _advance(advance, value)
            if value["state"] in ENDED or (deadline is not None and time.monotonic() >= deadline):
                return value
            if value["error"] and value["error"] != shown_error:
                shown_error = value["error"]
                click.echo(f"forq: {shown_error}", err=True)
            time.sleep(POLL_S)


def _advance(advance: Advance, value: dict[str, Any]) -> None:
    counts = value["counts"]
    advance("rows", counts["completed"] + counts["failed"] + counts["cancelled"], counts["total"])


def _print_status(value: dict[str, Any]) -> None:
    name = f" ({value['name']})" if value["name"] else ""
    click.echo(f"job {value['job_id']}{name}: {value['state']}, {_count_text(value['counts'])}")
    if value["eta_s"] is not None:
        click.echo(f"about {value['eta_s']:.0f} s left")
    if value["error"]:
        click.echo(value["error"], err=sys.stderr.isatty())


def _count_text(counts: dict[str, int]) -> str:
    text = f"{counts['completed']} of {counts['total']} answered"
    for name in ("failed", "cancelled"):
        if counts[name]:
            text += f", {counts[name]} {name}"
    return text
