"""Announces a job's change of state: rows for its tenant's webhooks, in the transaction that makes the change.

So nothing is announced that was rolled back, and nothing that was committed is lost. Called with the job's row held;
takes no lock that anybody keeps for longer than a statement.
"""

import json
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, func, insert, or_, select
from ulid import ULID

from db.clock import db_now, plain
from db.models import Job, Shard, Webhook, WebhookDelivery
from db.states import ENDED, DeliveryState, JobState, WebhookState

LIVE = (WebhookState.ACTIVE, WebhookState.FAILING)
PING = "ping"


class Event(StrEnum):
    RUNNING = "job.running"
    COMPLETED = "job.completed"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"


def announce(connection: Connection, job_id: str, state: JobState) -> None:
    """Queue the event of a job that has just entered `state`, once for each webhook that wants to hear of it."""
    event = Event(f"job.{state.value}")
    listening = connection.execute(
        select(Webhook.id, Webhook.events)
        .join(Job, Job.tenant == Webhook.tenant)
        .where(Job.id == job_id, Webhook.state.in_(LIVE), or_(Webhook.every_job, Webhook.id == Job.webhook_id))
    ).all()
    webhook_ids = [webhook.id for webhook in listening if event in webhook.events]
    if not webhook_ids:  # nearly always: one query is all that a job without webhooks pays
        return
    _queue(connection, webhook_ids, event, _facts(connection, job_id), job_id)


def ping(connection: Connection, webhook_id: str) -> str:
    """Queue an event that says nothing. Returns its id."""
    return _queue(connection, [webhook_id], PING, {"webhook_id": webhook_id})


def body_of(event: str, at: datetime, data: dict[str, Any]) -> str:
    """The shape that Standard Webhooks recommends."""
    return json.dumps({"type": event, "timestamp": plain(at), "data": data}, ensure_ascii=False)


def _queue(
    connection: Connection, webhook_ids: list[str], event: str, data: dict[str, Any], job_id: str | None = None
) -> str:
    event_id = f"evt_{ULID()}"
    body = body_of(event, connection.execute(select(db_now())).scalar_one(), data)
    connection.execute(
        insert(WebhookDelivery).values(
            [
                {
                    "event_id": event_id,
                    "webhook_id": webhook_id,
                    "job_id": job_id,
                    "type": str(event),
                    "payload": body,
                    "state": DeliveryState.PENDING,
                    "next_attempt_at": db_now(),
                    "created_at": db_now(),
                }
                for webhook_id in webhook_ids
            ]
        )
    )
    return event_id


def _facts(connection: Connection, job_id: str) -> dict[str, Any]:
    """What a receiver learns: nothing that a prompt, an answer or an error's text could be read from."""
    job = connection.execute(
        select(Job.id, Job.name, Job.state, Job.model, Job.num_rows, Job.num_completed, Job.num_failed,
               Job.num_cancelled, Job.created_at, Job.started_at, Job.finished_at).where(Job.id == job_id)
    ).one()  # fmt: skip
    counted: Any = job
    if job.state not in ENDED:
        names = ("num_completed", "num_failed", "num_cancelled")
        sums = [func.coalesce(func.sum(getattr(Shard, name)), 0).label(name) for name in names]
        counted = connection.execute(select(*sums).where(Shard.job_id == job_id)).one()
    return {
        "job_id": job.id,
        "name": job.name,
        "state": job.state,
        "model": job.model,
        "counts": {
            "total": job.num_rows,
            "completed": int(counted.num_completed),
            "failed": int(counted.num_failed),
            "cancelled": int(counted.num_cancelled),
        },
        "created_at": plain(job.created_at),
        "started_at": plain(job.started_at),
        "finished_at": plain(job.finished_at),
    }
