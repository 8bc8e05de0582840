"""Routes of batches: create, look at, list, cancel."""

import json
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, HTTPException, Query, Request
from starlette.concurrency import run_in_threadpool

from api.access import CallerDep
from api.dependencies import BatchSweeperDep, DatabaseDep, SettingsDep
from api.forms import read_form
from api.openai.errors import OpenAiRoute, responses
from api.openai.schemas import BatchesQuery, BatchList, BatchObject, CreateBatch, create_body, page
from jobs import batches
from jobs.errors import BadInput

MAX_BODY_BYTES = 8 << 20
"""The largest part is a template of at most a million characters."""

log = structlog.get_logger()
router = APIRouter(
    prefix="/v1/batches",
    tags=["batches"],
    route_class=OpenAiRoute,
    responses=responses(400, 401, 403, 429, 500, 503),
)


@router.post(
    "",
    operation_id="create_batch",
    summary="Make a batch of a file",
    response_model=BatchObject,
    responses=responses(404, 413),
    openapi_extra={"requestBody": create_body()},
)
async def create_batch(
    request: Request, settings: SettingsDep, database: DatabaseDep, caller: CallerDep, sweeper: BatchSweeperDep
) -> Any:
    """The answer comes before the file is looked at: the batch is `validating`.

    The same creation again within two minutes gives the same batch, because OpenAI's clients retry what they got no
    answer to. To run the same file twice, give it other `metadata`.
    """
    asked = read_form(CreateBatch, await _read_json(request)).asked()
    created = await run_in_threadpool(batches.create, database, settings, asked, caller.tenant, caller.only_tenant)
    sweeper.wake()
    log.info("batch_created", batch=created["id"], tenant=caller.tenant, key=caller.key_id)
    return created


@router.get("", operation_id="list_batches", summary="List batches, newest first", response_model=BatchList)
def list_batches(database: DatabaseDep, caller: CallerDep, query: Annotated[BatchesQuery, Query()]) -> Any:
    return page(*batches.list_batches(database, caller.only_tenant, after=query.after, limit=query.limit))


@router.get(
    "/{batch_id}",
    operation_id="get_batch",
    summary="A batch as it stands",
    response_model=BatchObject,
    responses=responses(404),
)
def get_batch(database: DatabaseDep, caller: CallerDep, batch_id: str) -> Any:
    return batches.find(database, batch_id, caller.only_tenant)


@router.post(
    "/{batch_id}/cancel",
    operation_id="cancel_batch",
    summary="Stop a batch",
    response_model=BatchObject,
    responses=responses(404),
)
async def cancel_batch(database: DatabaseDep, caller: CallerDep, sweeper: BatchSweeperDep, batch_id: str) -> Any:
    """It is `cancelling` until workers have let go of its rows, then `cancelled`, with the answers there were. One
    whose rows have all ended is refused (400)."""
    cancelled = await run_in_threadpool(batches.cancel, database, batch_id, caller.only_tenant)
    sweeper.wake()
    log.info("batch_cancelled", batch=batch_id, state=cancelled["status"], key=caller.key_id)
    return cancelled


async def _read_json(request: Request) -> Any:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is over {MAX_BODY_BYTES} bytes: shorten the template")
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise BadInput(f"the body is a JSON {type(value).__name__}: send an object")
    return value
