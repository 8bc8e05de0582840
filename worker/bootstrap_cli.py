"""The command `forq bootstrap`."""

from pathlib import Path
from typing import Any

import click

from jobs.console import print_json, progress
from jobs.context import open_service
from jobs.errors import BadInput, Unavailable

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--base", required=True, metavar="M", help="Alias of an instruction model.")
@click.option("--prompts", required=True, type=_FILE, metavar="P.parquet", help="Prompts of the kinds it will get.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Everything goes here; the same command again goes on where it stopped.")  # fmt: skip
@click.option("--recipe", type=_FILE, metavar="FILE.toml", help="How to do it.  [default: for small models]")
@click.option("--prompt-column", default="prompt", show_default=True, metavar="C", help="Column of the prompts.")
@click.option("--category-column", metavar="C", help="Column of categories.  [default: category, if there is one]")
@click.option("--answers", type=_FILE, metavar="A.parquet", help="The base's answers, as `forq export` wrote them.")
@click.option("--report-prompts", type=_FILE, metavar="R.parquet",
              help="Prompts of the final report.  [default: some of P are held out]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bootstrap(as_json: bool, recipe: Path | None, **options: Any) -> None:
    """Make a model that forks its answers out of an instruction model, without any data set.

    The base answers the prompts as a job of this service; its answers become paragraph trees; the base is trained on
    them; a report sets the two side by side. The model is in DIR/training/model. Takes hours on a CPU.

    \b
    Example:
      forq bootstrap --base smollm2-135m --prompts prompts.parquet --out my-apar-model
    """
    from apar.errors import AparError, InputError
    from worker.bootstrap.recipe import read_recipe
    from worker.bootstrap.run import Request
    from worker.bootstrap.run import bootstrap as run

    request = Request(recipe=read_recipe(recipe), **options)
    try:
        with open_service() as (settings, database), progress() as advance:
            found = run(database, settings, request, lambda line: click.echo(line, err=True), advance)
    except InputError as error:
        raise BadInput(str(error)) from error
    except AparError as error:
        raise Unavailable(str(error)) from error
    if as_json:
        print_json(found)
    else:
        click.echo(f"the model is in {request.out / 'training' / 'model'}, the report in {request.out / 'report'}")
