"""What routes ask for, as `Annotated` aliases. Everything lives on the application's state, set by its lifespan."""

from typing import Annotated

from fastapi import Depends, Path, Request
from starlette.concurrency import run_in_threadpool

from api.access import CallerDep
from api.batch_sweeper import BatchSweeper
from api.forms import JOB_ID_PATTERN, job_id_or_not_found
from api.longwork import LongWork
from api.schemas import JOB_ID
from api.watch import StatusWatch
from db.session import Database
from jobs import tenants
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


async def _batch_sweeper(request: Request) -> BatchSweeper:
    sweeper: BatchSweeper = request.app.state.batch_sweeper
    return sweeper


SettingsDep = Annotated[Settings, Depends(_settings)]
DatabaseDep = Annotated[Database, Depends(_database)]
WatchDep = Annotated[StatusWatch, Depends(_watch)]
LongWorkDep = Annotated[LongWork, Depends(_long_work)]
BatchSweeperDep = Annotated[BatchSweeper, Depends(_batch_sweeper)]


async def _job_id(
    job_id: Annotated[
        str,
        Path(description="Case does not matter.", examples=[JOB_ID], json_schema_extra={"pattern": JOB_ID_PATTERN}),
    ],
    caller: CallerDep,
    database: DatabaseDep,
) -> str:
    """The id of a job that the caller may see: what a route does with it needs no thought of tenants."""
    job_id = job_id_or_not_found(job_id)
    if caller.only_tenant is not None:
        await run_in_threadpool(tenants.check_job, database, job_id, caller.only_tenant)
    return job_id


JobIdDep = Annotated[str, Depends(_job_id)]
