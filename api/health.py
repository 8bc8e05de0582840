"""Probes for supervisors: is the process alive, and can it do its work."""

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request, Response

from api.dependencies import DatabaseDep, SettingsDep
from api.problems import problem, responses
from api.schemas import Check, Health, Readiness
from api.version import VERSION
from db.session import Database
from db.upgrade import current_revision, newest_revision
from jobs.doorbell import make_app
from jobs.settings import Settings

CHECK_TIMEOUT_S = 2.0
MAX_HANGING = 2
"""Threads per check that a host without an answer may hold; further probes wait for one in vain, and say so."""

router = APIRouter(tags=["health"], responses=responses(403, 500))


def probe_limiters() -> dict[str, anyio.CapacityLimiter]:
    return {name: anyio.CapacityLimiter(MAX_HANGING) for name in ("database", "broker")}


@router.get("/healthz", operation_id="get_health", summary="Is the process alive")
async def get_health() -> Health:
    """Asks nothing of database or broker: restarting this process would not mend them."""
    return Health(version=VERSION)


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Can it do its work",
    response_model=Readiness,
    responses=responses(503),
)
async def get_readiness(request: Request, settings: SettingsDep, database: DatabaseDep) -> Readiness | Response:
    """The database is reachable and at the newest schema, and the broker is reachable; each within two seconds."""
    limiters: dict[str, anyio.CapacityLimiter] = request.app.state.probe_limiters
    checks = await asyncio.gather(
        _run("database", partial(_check_database, database), limiters["database"]),
        _run("broker", partial(_check_broker, settings), limiters["broker"]),
    )
    failed = [check for check in checks if not check.ok]
    if failed:
        detail = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        return problem(503, detail, checks=[check.model_dump() for check in checks])
    return Readiness(checks=list(checks))


async def _run(name: str, check: Callable[[], tuple[bool, str]], limiter: anyio.CapacityLimiter) -> Check:
    """In few threads of its own, left behind when they hang: a dead host must use up neither those that serve requests
    nor those of the other check."""
    try:
        with anyio.fail_after(CHECK_TIMEOUT_S):
            ok, detail = await anyio.to_thread.run_sync(check, abandon_on_cancel=True, limiter=limiter)
    except TimeoutError:
        ok, detail = False, f"no answer within {CHECK_TIMEOUT_S:g} s"
    except Exception as error:  # drivers raise their own, and their texts hold addresses and passwords
        ok, detail = False, f"cannot be reached ({type(getattr(error, 'orig', None) or error).__name__})"
    return Check.model_validate({"name": name, "ok": ok, "detail": detail})


def _check_database(database: Database) -> tuple[bool, str]:
    current, newest = current_revision(database), newest_revision()
    if current != newest:
        return False, f"at revision {current}, the newest is {newest}: run `forq db upgrade`"
    return True, f"at revision {current}"


def _check_broker(settings: Settings) -> tuple[bool, str]:
    app = make_app(settings.celery_broker_url)
    with app.connection_for_write(connect_timeout=CHECK_TIMEOUT_S) as connection:
        connection.connect()
    return True, "reachable"
