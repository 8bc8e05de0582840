"""The command `forq db backup`."""

import json
import shlex
import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def backup(ctx: click.Context, file: Path, force: bool, as_json: bool) -> None:
    """Copy the SQLite database to FILE while everything runs; FILE appears whole and checked, or not at all.

    The copy is of the moment of its beginning. Submitted files are not in it: copy FORQ_HOME/data afterwards, files
    there never change. PostgreSQL has pg_dump, whose command this prints.

    \b
    Example:
      forq db backup /backups/forq.db
    """
    from sqlalchemy.engine import URL, make_url

    from db.backup import back_up

    url = make_url(ctx.find_root().obj())
    if url.get_backend_name() != "sqlite":
        shown = URL.create("postgresql", url.username, None, url.host, url.port, url.database).render_as_string()
        command = f"pg_dump --format=custom --file={shlex.quote(str(file))} {shlex.quote(shown)}"
        raise click.UsageError(f"the database is PostgreSQL: back it up with `{command}`", ctx)
    with click.progressbar(length=1, label="copying", file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        done = back_up(Path(url.database or ""), file.absolute(), force=force, progress=advance)
    if as_json:
        click.echo(json.dumps({"file": str(file), "bytes": done.num_bytes}))
    else:
        click.echo(f"{done.num_bytes:,} bytes in {file}")
