"""What `forq purge` takes of webhooks: events whose fate is old, and webhooks that were removed."""

from sqlalchemy import delete, func, literal, select

from db.clock import db_now
from db.models import Webhook, WebhookDelivery
from db.session import Database
from db.states import DeliveryState, WebhookState

REMOVED_S = 3600.0
"""No transaction that still saw a webhook before its removal lasts this long: nothing will refer to it any more."""


def purge_events(database: Database, older_than_s: float, *, dry_run: bool) -> int:
    """Delete events that were queued before the limit and delivered or given up; returns how many."""
    old = (WebhookDelivery.state != DeliveryState.PENDING) & (
        WebhookDelivery.created_at < db_now(literal(-older_than_s))
    )
    if dry_run:
        with database.read() as connection:
            return connection.execute(select(func.count()).select_from(WebhookDelivery).where(old)).scalar_one()
    removed = (Webhook.state == WebhookState.REMOVED) & (
        Webhook.removed_at < db_now(literal(-max(older_than_s, REMOVED_S)))
    )
    with database.write() as connection:
        num = connection.execute(delete(WebhookDelivery).where(old)).rowcount
        connection.execute(delete(Webhook).where(removed))
    return num
