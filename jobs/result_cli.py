"""The commands about answers: export, show, stats."""

from pathlib import Path
from typing import Any

import click

from jobs.console import print_json, print_table, progress
from jobs.context import open_service
from jobs.dataset.flags import dataset_flags, options_said
from jobs.dataset.options import DATASET_FORMATS, ExportOptions
from jobs.job_cli import job_argument, json_option
from jobs.remote.location import LOCATION, Location


@click.command()
@job_argument
@click.argument("out", type=LOCATION, required=False)
@click.option("--format", "format_", type=click.Choice(["parquet", "jsonl", "openai", *DATASET_FORMATS]),
              help="[default: by OUT's suffix]")  # fmt: skip
@click.option("--failed", is_flag=True, help="Only rows that failed.")
@click.option("--with-trees", is_flag=True, help="Add the thread trees (forq_tree).")
@click.option("--with-logprobs", is_flag=True, help="Add the log probabilities that the job asked for (forq_logprobs).")
@dataset_flags
@json_option
def export(
    job: str,
    out: Location | None,
    format_: str | None,
    failed: bool,
    with_trees: bool,
    with_logprobs: bool,
    no_recipe: bool,
    as_json: bool,
    **dataset: Any,
) -> None:
    """Write a job's input columns, untouched, with the result columns beside them, in input order.

    It works while the job runs: rows without an answer have nulls. OUT appears only when it is whole; it may
    be a URL (s3://, gs://, file://) under one of storage.roots.

    The formats messages and sharegpt, a filter, --dedup and --test-share make a data set: only answers are written, and
    what became of all of them is counted. OUT's suffix then says Parquet or JSON lines. A job that was made from a
    recipe is exported as the recipe says, with what is said here over it.

    The format openai is a line per row that has ended, as OpenAI's batches and `vllm run-batch` write them.

    \b
    Example:
      forq export 01JDQXK8V0E3M5T9ZB4W6Y7N2A answers.parquet
      forq export 01JDQXK8V0E3M5T9ZB4W6Y7N2A sft.jsonl --format messages --finish-reason stop --dedup near
    """
    from jobs.dataset.cli import export_as_said, print_export
    from jobs.dataset.stored import export_options

    with open_service() as (settings, database), progress() as advance:
        whole = failed or with_trees or with_logprobs
        base = ExportOptions() if no_recipe or whole else export_options(database, job)
        options = options_said(base, {**dataset, "format": format_})
        if out is None and options.out is None:
            raise click.UsageError("Missing argument 'OUT'.")
        target = out or LOCATION.convert(options.out, None, None)
        if whole and not options.is_plain:
            raise click.UsageError("--failed, --with-trees and --with-logprobs are not for a data set")
        printed = export_as_said(
            settings,
            database,
            job,
            target,
            options,
            advance,
            failed_only=failed,
            with_trees=with_trees,
            with_logprobs=with_logprobs,
        )
    print_export(printed, as_json)


@click.command()
@job_argument
@click.argument("row", type=click.IntRange(min=0))
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False),
              help="Draw the tree and its threads over the engine's steps to this file.")  # fmt: skip
@json_option
def show(job: str, row: int, svg: Path | None, as_json: bool) -> None:
    """Show one row's answer as its thread tree; ROW counts from 0.

    A detail is indented below the paragraph that forked it; what follows that paragraph stands on its level.

    \b
    Example:
      forq show 01JDQXK8V0E3M5T9ZB4W6Y7N2A 0 --svg answer.svg
    """
    from jobs import service
    from jobs.show import print_request

    with open_service() as (_, database):
        value = service.request_detail(database, job, row)
    if svg is not None:
        from jobs.drawing import draw_request

        draw_request(value, svg)
        click.echo(f"drawn to {svg}", err=True)
    if as_json:
        print_json(value)
    else:
        print_request(value)


@click.command()
@job_argument
@json_option
def stats(job: str, as_json: bool) -> None:
    """Show a job's memory receipt: what its answers cost, beside what decoding them one token at a time would.

    \b
    Example:
      forq stats 01JDQXK8V0E3M5T9ZB4W6Y7N2A
    """
    from jobs import service

    with open_service() as (_, database):
        value = service.job_stats(database, job)
    if as_json:
        print_json(value)
        return
    rows = [
        ["answers", value["num_samples"], None, None],
        ["answers that forked", value["forked_samples"], 0, None],
        ["prompt tokens", value["prompt_tokens"], None, None],
        ["prompt tokens from the prefix cache", value["cached_prompt_tokens"], None, None],
        ["prefix-cache hit rate", value["prefix_cache_hit_rate"], None, None],
        ["output tokens", value["output_tokens"], None, None],
        ["threads", value["threads"], value["num_samples"], None],
        ["threads of an answer, mean", value["mean_threads"], 1, None],
        ["threads of an answer, most", value["max_threads"], 1, None],
        ["threads at once, most", value["max_width"], 1, None],
        ["forks", value["forks"], 0, None],
        ["engine steps", value["steps"], value["sequential_steps"], value["steps_saved_percent"]],
        ["peak cached tokens", value["peak_cached_tokens"], value["sequential_peak_tokens"],
         value["peak_saved_percent"]],
        ["attended tokens", value["attended_tokens"], value["sequential_attended_tokens"],
         value["attended_saved_percent"]],
        ["peak blocks", value["peak_blocks"], None, None],
        ["preemptions", value["preemptions"], None, None],
    ]  # fmt: skip
    if value["forwards"] is not None:
        rows += [
            ["forwards", value["forwards"], None, None],
            ["tokens per forward (DE), mean", value["mean_decoding_efficiency"], 1, None],
            ["hit rate (HR), mean", value["mean_hit_rate"], None, None],
            ["acceptance length (AL), mean", value["mean_acceptance_length"], None, None],
            ["draft nodes", value["draft_nodes"], None, None],
            ["verified nodes", value["verify_nodes"], None, None],
        ]
    title = f"job {value['job_id']} ({value['state']}, {value['decoding']})"
    print_table(title, ["sum over answers", "here", "sequential", "saved %"], rows)
