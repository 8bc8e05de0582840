"""A sender's turns, a webhook with one event, and what arrived."""

import asyncio
from typing import Any

from receiver import Receiver
from standardwebhooks import Webhook

from db.session import Database
from jobs.settings import Settings
from jobs.webhooks import deliveries, registry
from jobs.webhooks.sender import Sender


def send(database: Database, settings: Settings, turns: int = 1, **options: Any) -> list[int]:
    """Turns of one sender, each with what is due then; returns the attempts of each."""

    async def run() -> list[int]:
        sender = Sender(database, settings, **options)
        try:
            return [await sender.once() for _ in range(turns)]
        finally:
            await sender.close()

    return asyncio.run(run())


def ping(database: Database, settings: Settings, url: str) -> tuple[str, str]:
    """A webhook with one event; returns its id and secret."""
    described, secret = registry.add(database, settings, url)
    registry.queue_ping(database, described["id"])
    return described["id"], secret


def only(database: Database) -> dict[str, Any]:
    (delivery,) = deliveries.list_deliveries(database)
    return delivery


def verified(receiver: Receiver, secret: str, number: int = -1) -> Any:
    return Webhook(secret).verify(receiver.got[number].body, receiver.got[number].headers)
