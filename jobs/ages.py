"""Lengths of time as people write them on the command line: 90d, 12h, or ISO 8601."""

import click

MAX_AGE_DAYS = 36_500


def age_s(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The callback of a click option; its value is then in seconds."""
    from datetime import timedelta

    from pydantic import TypeAdapter, ValidationError

    if value is None:
        return None
    # 12h is short for ISO 8601's PT12H; no 30m, which might be months.
    text = f"PT{value.upper()}" if value[:-1].isdecimal() and value[-1:] in ("h", "H") else value
    try:
        age = TypeAdapter(timedelta).validate_python(text)
    except ValidationError:
        raise click.BadParameter(f"{value!r} is no length of time: write 30d, 12h or ISO 8601 (P30D)") from None
    if not timedelta(0) < age <= timedelta(days=MAX_AGE_DAYS):
        raise click.BadParameter(f"{value!r} must be more than 0 and at most {MAX_AGE_DAYS}d")
    return age.total_seconds()
