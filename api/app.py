"""Builds the application: state for its lifetime, routers, problems, the OpenAPI document. `forq api` serves it.

Swagger's and ReDoc's pages are off: they load their scripts from a CDN, which a closed network cannot reach. The
document itself is at /openapi.json (api/description.py).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from api import description, exports, health, jobs, models, problems, results, scratch, webhooks
from api.access import Access, authorize
from api.batch_sweeper import BatchSweeper
from api.guards import CrashGuard, LoopbackGuard
from api.longwork import LongWork
from api.openai import batches as openai_batches
from api.openai import files as openai_files
from api.outage import DatabaseOutage
from api.schemas import Problem
from api.version import VERSION
from api.watch import POLL_S, StatusWatch
from db.session import Database
from jobs import service
from jobs.settings import Settings

_REF = "#/components/schemas/{model}"
_TAGS = [
    {"name": "jobs", "description": "A job is a file of prompts: one request per row."},
    {"name": "results", "description": "Answers, as a file."},
    {"name": "batches", "description": "Files and batches as OpenAI's clients know them; errors in OpenAI's form."},
    {"name": "models", "description": "What a job may name as its model."},
    {"name": "webhooks", "description": "Who is told when jobs change their state."},
    {"name": "health", "description": "Probes."},
]


def create_app(
    settings: Settings, *, any_host: bool = False, keys_required: bool = False, poll_s: float = POLL_S
) -> FastAPI:
    """The REST API over one database.

    Args:
        any_host: answer whatever name the client used. Without it, and where keys are not required, loopback names only
            (api/guards.py says why).
        keys_required: whatever the settings say; for an address that other machines reach.
        poll_s: how often a long poll looks at its job.
    """
    keys_required = keys_required or settings.api.require_keys is True
    app = FastAPI(
        title="forq",
        summary="Asynchronous batch generation",
        version=VERSION,
        lifespan=partial(_lifespan, settings=settings, keys_required=keys_required, poll_s=poll_s),
        openapi_tags=_TAGS,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for module in (jobs, results, exports, models, openai_files, openai_batches, webhooks, description):
        app.include_router(module.router, dependencies=[Depends(authorize)])
    app.include_router(health.router)  # supervisors and load balancers have no keys
    problems.install(app)
    if not (any_host or keys_required):
        app.add_middleware(LoopbackGuard)
    app.add_middleware(CrashGuard)
    app.openapi = partial(_openapi, app, keys_required)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI, *, settings: Settings, keys_required: bool, poll_s: float) -> AsyncIterator[None]:
    scratch.prepare(settings)
    database = Database(settings.sqlalchemy_url)
    watch = StatusWatch(partial(service.job_status, database), poll_s)
    app.state.settings = settings
    app.state.database = database
    app.state.database_outage = outage = DatabaseOutage(database)
    app.state.access = access = Access(database, settings.api, always_required=keys_required)
    app.state.watch = watch
    app.state.long_work = LongWork(watch.closing)
    app.state.probe_limiters = health.probe_limiters()
    app.state.batch_sweeper = sweeper = BatchSweeper(database, settings)
    sweeper.start()
    try:
        yield
    finally:
        watch.closing.set()
        await sweeper.close()
        await access.close()
        await outage.close()
        database.dispose()


def begin_shutdown(app: FastAPI) -> None:
    """Let those who wait go. The server calls it: the lifespan's end comes only after every request has ended."""
    app.state.watch.closing.set()
    app.state.batch_sweeper.begin_stop()


def _openapi(app: FastAPI, keys_required: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, tags=_TAGS, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        problem = Problem.model_json_schema(ref_template=_REF)
        schemas.update(problem.pop("$defs"))
        schemas["Problem"] = problem
        # FastAPI writes its own 422 wherever none is said; in OpenAI's form refused values are 400.
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            if operation.get("tags") == ["batches"]:
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if not keys_required:  # then an empty requirement says that it may also go without
            for operation in (operation for path in document["paths"].values() for operation in path.values()):
                if "security" in operation:
                    operation["security"].insert(0, {})
        app.openapi_schema = document
    return app.openapi_schema
