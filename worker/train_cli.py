"""The command `forq train`: the decoding library's own, which takes a model by its alias here."""

from pathlib import Path
from typing import Any

import click

from apar.training.cli import train
from jobs.settings import get_settings


def with_aliases(command: click.Command, help_: str) -> click.Command:
    """The command, with a `--base` that takes a model's alias as well as a folder."""

    def changed(param: click.Parameter) -> click.Parameter:
        if param.name != "base":
            return param
        options: dict[str, Any] = {
            "required": True, "type": click.Path(path_type=Path), "metavar": "M", "callback": _base_folder,
            "help": help_,
        }  # fmt: skip
        return click.Option(["--base"], **options)

    params = [*map(changed, command.params)]
    return click.Command(command.name, callback=command.callback, params=params, help=command.help)


def _base_folder(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    from worker.models import resolve_model

    settings = get_settings()
    if str(value) not in settings.models:
        return value
    return resolve_model(str(value), settings, report=lambda line: click.echo(line, err=True)).path


train = with_aliases(
    train, "Alias, or folder in the Hugging Face layout, of the model to start from; it has a chat template."
)
