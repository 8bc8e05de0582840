"""The command `forq train`: the decoding library's own, which takes a model by its alias here."""

from pathlib import Path
from typing import Any

import click

from apar.training.cli import train
from jobs.settings import get_settings


def _base_folder(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    from worker.models import resolve_model

    settings = get_settings()
    if str(value) not in settings.models:
        return value
    return resolve_model(str(value), settings, report=lambda line: click.echo(line, err=True)).path


def _with_aliases(command: click.Command) -> click.Command:
    def changed(param: click.Parameter) -> click.Parameter:
        if param.name != "base":
            return param
        options: dict[str, Any] = {
            "required": True, "type": click.Path(path_type=Path), "metavar": "M", "callback": _base_folder,
            "help": "Alias, or folder in the Hugging Face layout, of the model to start from; it has a chat template.",
        }  # fmt: skip
        return click.Option(["--base"], **options)

    return click.Command("train", callback=command.callback, params=[*map(changed, command.params)], help=command.help)


train = _with_aliases(train)
