"""A service's settings, and how many jobs it has."""

from pathlib import Path

from database_fixtures import Templates
from sqlalchemy import func, select

from db.models import Job as JobRow
from db.session import Database
from jobs.settings import Settings


def settings_in(home: Path, broker_url: str, templates: Templates) -> Settings:
    home.mkdir()
    (home.parent / "files").mkdir()
    (home / "forq.toml").write_text(f'[storage]\nroots = ["file://{home.parent}/files"]\n')
    return Settings(home=home, database_url=templates.copy("sqlite", home), broker_url=broker_url)


def num_jobs(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(JobRow)).scalar_one()
