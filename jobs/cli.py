"""The root of the command line. Commands live with their rooms and are loaded when they are used."""

import sys
from importlib.metadata import version
from typing import Any

import click

from jobs.errors import ForqError
from jobs.faults import printable
from jobs.lazy_group import LazyGroup

COMMANDS = {
    "up": ("jobs.up_cli:up", "Run everything on this machine: broker, worker, API, drop folder."),
    "down": ("jobs.up_cli:down", "Stop what `up --detach` started."),
    "submit": ("jobs.job_cli:submit", "Submit a Parquet or JSONL file as a job."),
    "run": ("jobs.dataset.cli:run", "Run a recipe: submit, wait, export."),
    "recipe": ("jobs.dataset.cli:recipe", "Print the recipe that a job was made from."),
    "status": ("jobs.job_cli:status", "Show one job's state and counts."),
    "wait": ("jobs.job_cli:wait", "Wait until a job has ended."),
    "list": ("jobs.job_cli:list_", "List jobs, newest first."),
    "cancel": ("jobs.job_cli:cancel", "Stop a job; finished rows are kept."),
    "retry": ("jobs.job_cli:retry", "Run a job's failed rows again."),
    "export": ("jobs.result_cli:export", "Write a job's rows and answers to a file."),
    "show": ("jobs.result_cli:show", "Show one row's answer as its thread tree."),
    "stats": ("jobs.result_cli:stats", "Show a job's memory receipt."),
    "judge": ("jobs.judging.cli:judge", "Have a model judge answers, and report on its verdicts."),
    "check": ("worker.check_cli:check", "Dry run: count tokens, find rows that cannot run."),
    "data": ("apar.cli:data", "Make training data from answers."),
    "train": ("worker.train_cli:train", "Teach a model to fork its answers."),
    "train-medusa": ("worker.train_medusa_cli:train_medusa", "Train Medusa heads, which guess a model's next tokens."),
    "eval": ("worker.eval_cli:evaluate", "Compare a model that forks with its base."),
    "bootstrap": ("worker.bootstrap_cli:bootstrap", "Make a model that forks out of an instruction model."),
    "worker": ("worker.cli:worker", "Run one worker."),
    "api": ("api.cli:api", "Run the REST API."),
    "keys": ("jobs.keys_cli:keys", "Manage the keys of the REST API."),
    "watch": ("jobs.drop.cli:watch", "Watch the drop folder."),
    "webhooks": ("jobs.webhooks.cli:webhooks", "Tell other services when jobs change their state."),
    "db": ("db.cli:db", "Manage the database's schema."),
    "purge": ("jobs.upkeep.cli:purge", "Delete jobs that ended long ago."),
    "doctor": ("jobs.upkeep.cli:doctor", "Check that what is stored agrees."),
    "ps": ("jobs.up_cli:ps", "List the running parts."),
}


@click.group(
    cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(version("forq"), prog_name="forq")
@click.pass_context
def forq(ctx: click.Context) -> None:
    """Asynchronous batch generation with language models.

    Submit a Parquet file of prompts, poll, and export the answers. Configuration: forq.toml and FORQ_* variables.

    \b
    Example:
      forq up --detach
      forq submit questions.parquet --wait
    """
    ctx.obj = _database_url  # for rooms that may not import the settings


def main(args: list[str] | None = None) -> None:
    """Entry point: domain errors become one line on stderr and their exit code, here and only here."""
    try:
        result: Any = forq.main(args=args, prog_name="forq", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "forq"
        message = error.format_message().rstrip(".")
        _say(f"{message}{'' if message.endswith('?') else ';'} see `{command} --help`")
        sys.exit(2)
    except click.Abort:
        click.echo("forq: interrupted", err=True)
        sys.exit(130)
    except ForqError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `forq list | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a folder that cannot be made, a full disk
        _say(f"{error.filename or 'this machine'}: {error.strerror or error}")
        sys.exit(1)
    except Exception as error:
        line = _database_trouble(error)
        if line is None:
            raise
        _say(line)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _say(fault: str) -> None:
    """One line whatever a user's value, or a file's name, has in it."""
    click.echo(f"forq: {printable(fault, ' ')}", err=True)


def _database_url() -> str:
    from jobs.settings import get_settings

    return get_settings().sqlalchemy_url


def _database_trouble(error: Exception) -> str | None:
    if type(error).__module__.partition(".")[0] != "sqlalchemy":
        return None
    from sqlalchemy.exc import OperationalError, ProgrammingError

    if isinstance(error, OperationalError | ProgrammingError):
        reason = str(error.orig).strip().splitlines()[0]
        if "no such table" in reason or "does not exist" in reason:
            return f"the database has no tables yet ({reason}): run `forq db upgrade`"
        if any(words in reason for words in ("disk is full", "disk I/O error", "No space left")):
            return f"the database cannot be used ({reason}): make room on its disk, and try again"
        return f"the database cannot be used ({reason}): check FORQ_DATABASE_URL and that it runs"
    return None


if __name__ == "__main__":
    main()
