"""The commands `forq run` and `forq recipe`, and what `forq export` does for a data set."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.console import Advance, print_json, progress
from jobs.context import open_service
from jobs.dataset.flags import print_counts
from jobs.dataset.options import ExportOptions
from jobs.job_cli import job_argument, json_option, wait_until_ended
from jobs.remote.location import LOCATION, Location
from jobs.remote.urls import Url

if TYPE_CHECKING:
    from db.session import Database
    from jobs.settings import Settings


@click.command()
@click.argument("recipe", metavar="RECIPE.toml", type=click.Path(path_type=Path))
@click.option("--submit-only", is_flag=True, help="Do not wait and export.")
@click.option("--again", is_flag=True, help="Make a new job, also where this run has one.")
@json_option
def run(recipe: Path, submit_only: bool, again: bool, as_json: bool) -> int:
    """Run a recipe: submit its input, wait for the answers, export them as it says.

    The same recipe over the same input is one job: run it again to go on waiting, or to export anew with another
    [export] section. The recipe is stored with the job, whole.

    \b
    Example:
      forq run recipe.toml
    """
    from jobs import doorbell
    from jobs.dataset.pipeline import check_columns
    from jobs.dataset.recipe import check_content, read_recipe
    from jobs.dataset.stored import keep_recipe
    from jobs.remote.files import input_file
    from jobs.submit import check_options, submit_file

    with open_service() as (settings, database):
        said = read_recipe(recipe, settings.default_model)
        check_options(settings, said.submit_options())  # before anything is fetched
        if said.export is not None:  # rather than behind hours of generation
            check_export(settings, said.export)
        source: Location = LOCATION.convert(said.input, None, None)
        with progress() as advance, input_file(settings, source, advance) as path:
            said = said.model_copy(update={"input_sha256": check_content(said, path)})
            options = replace(said.submit_options(), recipe=said.text(), dedupe=not again)
            submitted = submit_file(database, settings, path, options, advance)
        job = submitted.job_id
        if not submitted.is_new:
            keep_recipe(database, job, said.text())
        doorbell.ring(settings, submitted.model, submitted.num_shards)
        was = "" if submitted.is_new else ", submitted before"
        if not as_json:
            click.echo(f"job {job}: {submitted.num_rows} rows{was}")
        if said.export is not None and said.export.column:
            # The job goes on all the same: it is the mended recipe's, too.
            check_columns(database, settings, job, said.export)
        if submit_only:
            if as_json:
                print_json({"job_id": job})
            return 0
        state = wait_until_ended(database, job, None)["state"]
        if state != "completed":
            click.echo(f"forq: job {job} is {state}: `forq retry {job}`, or run the recipe with --again", err=True)
            return 1
        if said.export is not None and said.export.out is not None:
            out = LOCATION.convert(said.export.out, None, None)
            with progress() as advance:
                printed = export_as_said(settings, database, job, out, said.export, advance)
            print_export(printed, as_json)
        elif as_json:
            print_json({"job_id": job})
    return 0


@click.command()
@job_argument
def recipe(job: str) -> None:
    """Print the recipe that a job was made from, as it was stored; `forq run` takes it as it is.

    \b
    Example:
      forq recipe 01JDQXK8V0E3M5T9ZB4W6Y7N2A > recipe.toml
    """
    from jobs.dataset.stored import recipe_text

    with open_service() as (_, database):
        click.echo(recipe_text(database, job), nl=False)


def check_export(settings: "Settings", options: ExportOptions) -> None:
    """What can be told of an export before there are answers to wait for.

    Raises:
        BadInput: an expression does not compile, or nothing can be written there.
    """
    from jobs.dataset.filters import Filters
    from jobs.dataset.pipeline import targets_of
    from jobs.errors import BadInput
    from jobs.export import format_of

    Filters(options)
    if options.out is None:
        return
    out: Location = LOCATION.convert(options.out, None, None)
    if isinstance(out, Url):
        _check_url(out)
        settings.storage.root_of(out, to_write=True, tenant=None)
    elif not options.is_plain:
        targets_of(out, options)
    elif out.is_dir() or not out.parent.is_dir():
        raise BadInput(f"{out}: not a file in a folder that exists")
    if options.format is None:
        format_of(Path(out.name))


def export_as_said(
    settings: "Settings",
    database: "Database",
    job: str,
    out: Location,
    options: ExportOptions,
    advance: Advance,
    **whole: bool,
) -> dict[str, Any]:
    """Write all rows as they are, or a data set; returns what `forq export --json` prints of it.

    Args:
        whole: `failed_only`, `with_trees`, `with_logprobs` of `export_job`; not for a data set.
    """
    from jobs.dataset.pipeline import export_dataset
    from jobs.export import export_job, format_of
    from jobs.remote.files import output_file

    if options.is_plain:
        format = options.format or format_of(Path(out.name))
        with output_file(settings, out, advance) as path:
            num_rows = export_job(database, settings, job, path, format=format, progress=advance, **whole).num_rows
        return {"job_id": job, "file": str(out), "rows": num_rows}
    if isinstance(out, Url):
        _check_url(out)
    with output_file(settings, out, advance) as path:
        done = export_dataset(database, settings, job, path, options, advance)
    counts = done.counts.as_dict()
    test = None if done.test is None else _place(out, done.test)
    return {"job_id": job, "file": _place(out, done.train), "test_file": test, "rows": counts["written"],
            "counts": counts}  # fmt: skip


def _check_url(out: Url) -> None:
    from jobs.errors import BadInput

    if not Path(out.name).suffix:
        raise BadInput(f"{out}: a URL names a file: give it a suffix, .parquet or .jsonl")


def print_export(printed: dict[str, Any], as_json: bool) -> None:
    if "counts" not in printed:
        print_json(printed) if as_json else click.echo(f"{printed['rows']} rows in {printed['file']}")
        return
    for name, file in (("train", "file"), ("test", "test_file")):
        if printed[file] and not printed["counts"][name]:
            click.echo(f"forq: {printed[file]} has no rows, and `datasets` loads no empty file", err=True)
    if as_json:
        print_json(printed)
        return
    print_counts(printed["counts"])
    also = f" and {printed['test_file']}" if printed["test_file"] else ""
    click.echo(f"{printed['rows']} rows in {printed['file']}{also}")


def _place(out: Location, written: Path) -> str:
    """Where a file is in the end: a URL's are written in the scratch folder first."""
    return str(written) if isinstance(out, Path) else str(out.beside(written.name))
