"""What is asked and said about webhooks, as pydantic models: the dicts of `jobs.webhooks`, key by key."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from api.schemas import JOB_ID, Moment
from db.states import DeliveryState, WebhookState
from jobs.webhooks.deliveries import MAX_LIST
from jobs.webhooks.events import Event
from jobs.webhooks.urls import MAX_URL_CHARS

EventName = Literal["job.running", "job.completed", "job.failed", "job.cancelled"]
ALL: list[EventName] = ["job.running", "job.completed", "job.failed", "job.cancelled"]
assert set(ALL) == set(Event)


class WebhookForm(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        description="https, and within what the operator allows (`webhooks.allow`).",
        examples=["https://hooks.example.com/forq"],
        json_schema_extra={"maxLength": MAX_URL_CHARS},
    )
    events: list[EventName] = Field(ALL, min_length=1)
    every_job: StrictBool = Field(True, description="False: only of jobs that name it, in the form field `webhook`.")


class RotateForm(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    overlap_s: float = Field(
        86_400, ge=0, le=30 * 86_400, strict=True, allow_inf_nan=False,
        description="How long the old secret signs beside the new one, in seconds.",
    )  # fmt: skip


class Webhook(BaseModel):
    id: str = Field(examples=[JOB_ID])
    tenant: str
    url: str
    events: list[EventName]
    every_job: bool
    state: WebhookState = Field(description="`failing`: tried seldom; `gone`: its receiver answered 410.")
    num_failures: int = Field(description="Attempts that failed since the last one that did not.")
    resume_at: Moment | None = Field(description="Of a failing one: nothing is sent before.")
    created_at: Moment
    num_pending: int = Field(description="Events that are still to be sent.")
    old_secret_until: Moment | None = Field(description="After a rotation, how long the old secret signs, too.")


class WebhookWithSecret(Webhook):
    secret: str = Field(description="Signs what is sent (Standard Webhooks). Shown this once.")


class WebhookList(BaseModel):
    webhooks: list[Webhook]


class QueuedPing(BaseModel):
    event_id: str


class Delivery(BaseModel):
    """One event for one webhook."""

    event_id: str = Field(description="The header `webhook-id`, the same at every attempt.")
    webhook_id: str
    job_id: str | None
    type: str
    state: DeliveryState
    attempts: int
    last_status: int | None = Field(description="HTTP status of the last attempt, if it was answered.")
    last_error: str | None
    created_at: Moment
    next_attempt_at: Moment | None
    delivered_at: Moment | None


class DeliveryList(BaseModel):
    deliveries: list[Delivery]


class DeliveryQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(50, ge=1, le=MAX_LIST)
    state: DeliveryState | None = None
