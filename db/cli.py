"""The command `forq db`."""

import click

from db.backup_cli import backup


@click.group()
def db() -> None:
    """Manage the database's schema.

    \b
    Example:
      forq db upgrade
    """


@db.command()
@click.pass_context
def upgrade(ctx: click.Context) -> None:
    """Bring the database to this version's schema; harmless when it is there already.

    \b
    Example:
      forq db upgrade
    """
    from db.session import Database
    from db.upgrade import current_revision
    from db.upgrade import upgrade as run

    # The root command knows the configuration; this room imports nothing of ours.
    url = ctx.find_root().obj()
    run(url)
    database = Database(url)
    try:
        click.echo(f"the database is at revision {current_revision(database)}")
    finally:
        database.dispose()


db.add_command(backup)
