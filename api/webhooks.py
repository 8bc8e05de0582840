"""Routes of webhooks: whom to tell when a tenant's jobs change their state. The sending is done in jobs/webhooks.

Like jobs, they are of the caller's tenant, and another tenant's reads like none.
"""

from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Path, Query

from api.access import CallerDep, KeyFirstRoute
from api.dependencies import DatabaseDep, SettingsDep
from api.problems import responses
from api.schemas import JOB_ID
from api.webhook_schemas import (
    DeliveryList,
    DeliveryQuery,
    QueuedPing,
    RotateForm,
    Webhook,
    WebhookForm,
    WebhookList,
    WebhookWithSecret,
)
from jobs.webhooks import registry
from jobs.webhooks.deliveries import list_deliveries

log = structlog.get_logger()
router = APIRouter(
    prefix="/v1/webhooks",
    tags=["webhooks"],
    route_class=KeyFirstRoute,
    responses=responses(401, 403, 413, 422, 429, 500, 503),
)


WebhookIdDep = Annotated[str, Path(description="As the creation answered it.", examples=[JOB_ID])]


@router.post(
    "",
    operation_id="create_webhook",
    summary="Be told when jobs change their state",
    status_code=201,
    response_model=WebhookWithSecret,
    responses=responses(400, 409),
)
def create_webhook(settings: SettingsDep, database: DatabaseDep, caller: CallerDep, form: WebhookForm) -> Any:
    """The secret is in this answer and in no later one."""
    described, secret = registry.add(
        database, settings, form.url, form.events, tenant=caller.tenant, every_job=form.every_job
    )
    log.info("webhook_added", webhook=described["id"], tenant=caller.tenant, key=caller.key_id)
    return {**described, "secret": secret}


@router.get("", operation_id="list_webhooks", summary="List webhooks", response_model=WebhookList)
def list_webhooks(database: DatabaseDep, caller: CallerDep) -> Any:
    """Without their secrets."""
    return {"webhooks": registry.list_webhooks(database, caller.only_tenant)}


@router.get(
    "/{webhook_id}", operation_id="get_webhook", summary="One webhook", response_model=Webhook, responses=responses(404)
)
def get_webhook(database: DatabaseDep, caller: CallerDep, webhook_id: WebhookIdDep) -> Any:
    return registry.get(database, webhook_id, caller.only_tenant)


@router.delete(
    "/{webhook_id}",
    operation_id="remove_webhook",
    summary="Send it nothing more",
    response_model=Webhook,
    responses=responses(404),
)
def remove_webhook(database: DatabaseDep, caller: CallerDep, webhook_id: WebhookIdDep) -> Any:
    """What it was still to be told is forgotten. Answers with the webhook as it was."""
    described = registry.remove(database, webhook_id, caller.only_tenant)
    log.info("webhook_removed", webhook=described["id"], key=caller.key_id)
    return described


@router.post(
    "/{webhook_id}/rotate",
    operation_id="rotate_webhook",
    summary="Give it a new secret",
    response_model=WebhookWithSecret,
    responses=responses(400, 404, 409),
)
def rotate_webhook(database: DatabaseDep, caller: CallerDep, webhook_id: WebhookIdDep, form: RotateForm) -> Any:
    """For `overlap_s`, deliveries carry a signature of the old secret, too."""
    described, secret = registry.rotate(database, webhook_id, caller.only_tenant, overlap_s=form.overlap_s)
    log.info("webhook_rotated", webhook=described["id"], key=caller.key_id)
    return {**described, "secret": secret}


@router.post(
    "/{webhook_id}/test",
    operation_id="test_webhook",
    summary="Queue a ping",
    status_code=202,
    response_model=QueuedPing,
    responses=responses(404, 409),
)
def test_webhook(database: DatabaseDep, caller: CallerDep, webhook_id: WebhookIdDep) -> Any:
    """The sender delivers it like any event; its fate is among the webhook's deliveries."""
    return {"event_id": registry.queue_ping(database, webhook_id, caller.only_tenant)}


@router.get(
    "/{webhook_id}/deliveries",
    operation_id="list_deliveries",
    summary="What was sent or is to be sent, newest first",
    response_model=DeliveryList,
    responses=responses(404),
)
def list_webhook_deliveries(
    database: DatabaseDep, caller: CallerDep, webhook_id: WebhookIdDep, query: Annotated[DeliveryQuery, Query()]
) -> Any:
    described = registry.get(database, webhook_id, caller.only_tenant)
    found = list_deliveries(database, webhook_id=described["id"], state=query.state, limit=query.limit)
    return {"deliveries": found}
