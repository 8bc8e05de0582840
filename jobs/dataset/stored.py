"""Recipes in the database, each in its job's row."""

from sqlalchemy import update

from db.models import Job
from db.session import Database
from jobs.dataset.options import ExportOptions
from jobs.dataset.recipe import parse_recipe
from jobs.errors import NotFound
from jobs.service import job_detail


def recipe_text(database: Database, job_id: str) -> str:
    """The recipe a job was made from, as it is stored.

    Raises:
        NotFound: no such job, or it was submitted without one.
    """
    text: str | None = job_detail(database, job_id).recipe
    if text is None:
        raise NotFound(f"job {job_id} was submitted without a recipe: `forq status {job_id}` says what is known of it")
    return text


def keep_recipe(database: Database, job_id: str, text: str) -> None:
    """Store the recipe a job was last run with: of the same run, maybe with another export."""
    with database.write() as connection:
        connection.execute(update(Job).where(Job.id == job_id).values(recipe=text))


def export_options(database: Database, job_id: str) -> ExportOptions:
    """What the job's recipe says about its export; nothing where it has none."""
    text: str | None = job_detail(database, job_id).recipe
    if text is None:
        return ExportOptions()
    return parse_recipe(text, f"the recipe of job {job_id}").export or ExportOptions()
