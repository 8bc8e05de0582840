"""A click group that imports a command's module only when that command is run or asked for help.

`forq --help` prints each command's one line from the table, so it needs none of the modules.
"""

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        """`lazy` maps a command's name to ("module:attribute", its one-line help)."""
        super().__init__(*args, **kwargs)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._lazy[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, line) for name, (_, line) in self._lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Unknown commands get a suggestion instead of a bare refusal."""
        import difflib

        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)
