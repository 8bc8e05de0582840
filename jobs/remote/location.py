"""What the command line takes for a file: a path, or a URL."""

from pathlib import Path

import click

from jobs.remote.urls import Url, is_url, parse_url

Location = Path | Url


class LocationParam(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases
    """A URL is what has `://` in it; anything else is a path, which may name any file, as everywhere."""

    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        if isinstance(value, str) and is_url(value):
            return parse_url(value)
        return value if isinstance(value, Url) else Path(str(value))


LOCATION = LocationParam()
