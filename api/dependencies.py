"""What routes ask for, as `Annotated` aliases. Everything lives on the application's state, set by its lifespan."""

from typing import Annotated

from fastapi import Depends, Path, Request

from api.forms import job_id_or_not_found
from api.longwork import LongWork
from api.schemas import JOB_ID
from api.watch import StatusWatch
from db.session import Database
from jobs.settings import Settings

# All async: a plain function here would cost a hop to the thread pool per request.


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


async def _watch(request: Request) -> StatusWatch:
    watch: StatusWatch = request.app.state.watch
    return watch


async def _long_work(request: Request) -> LongWork:
    long_work: LongWork = request.app.state.long_work
    return long_work


async def _job_id(job_id: Annotated[str, Path(description="Case does not matter.", examples=[JOB_ID])]) -> str:
    return job_id_or_not_found(job_id)


SettingsDep = Annotated[Settings, Depends(_settings)]
DatabaseDep = Annotated[Database, Depends(_database)]
WatchDep = Annotated[StatusWatch, Depends(_watch)]
LongWorkDep = Annotated[LongWork, Depends(_long_work)]
JobIdDep = Annotated[str, Depends(_job_id)]
