"""`forq webhooks test`: one ping from this process, past the outbox, so that its outcome can be printed."""

from datetime import UTC, datetime

from ulid import ULID

from jobs.webhook_settings import WebhookSettings
from jobs.webhooks import posting
from jobs.webhooks.deliveries import Outcome
from jobs.webhooks.events import PING, body_of
from jobs.webhooks.registry import SigningKeys


async def send_ping(settings: WebhookSettings, keys: SigningKeys, webhook_id: str) -> tuple[str, Outcome]:
    """Returns the event's id and what came of it."""
    event_id, now = f"evt_{ULID()}", datetime.now(UTC)
    body = body_of(PING, now, {"webhook_id": webhook_id})
    headers = posting.signed_headers(keys.secrets, event_id, body, now)
    async with posting.make_client() as client:
        return event_id, await posting.post(client, settings, keys.url, body, headers)
