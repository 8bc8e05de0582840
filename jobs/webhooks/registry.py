"""The webhooks of a tenant: add, list, remove, change the secret.

The secret signs, so it is stored as it is: whoever reads the database can sign as this service. It is shown once, when
it is made, and is in no list, log or message.
"""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, delete, func, insert, literal, or_, select, true, update
from ulid import ULID

from db import locks
from db.clock import db_now, plain
from db.models import DEFAULT_TENANT, Webhook, WebhookDelivery
from db.session import Database
from db.states import DeliveryState, WebhookState
from jobs import tenants
from jobs.errors import BadInput, Conflict, NotFound
from jobs.messages import storable
from jobs.settings import Settings
from jobs.webhooks.events import LIVE, Event, ping
from jobs.webhooks.urls import check_allowed, parse

MAX_PER_TENANT = 20
"""Each costs a row at every change of state of every job."""
SECRET_BYTES = 32
OVERLAP_S = 24 * 3600.0
"""After a rotation the old secret signs beside the new one for so long, unless told otherwise."""
MAX_OVERLAP_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """What one delivery, or one ping, is sent with."""

    url: str
    secrets: tuple[str, ...]
    """The newest first."""


def add(
    database: Database,
    settings: Settings,
    url: str,
    events: Sequence[str] = tuple(Event),
    *,
    tenant: str = DEFAULT_TENANT,
    every_job: bool = True,
) -> tuple[dict[str, Any], str]:
    """Make a webhook. Returns what `list_webhooks` says of it, and its secret, which nothing shows again.

    Raises:
        BadInput: the address is not allowed, or an event or the tenant's name is none.
        Conflict: the tenant has one with this address, or as many as it may.
    """
    target = parse(url)
    check_allowed(target, settings.webhooks.allowed)
    said = set(events)
    if not said or not said <= set(Event):
        raise BadInput(f"the events are {', '.join(sorted(said)) or 'none'}: give one or more of {', '.join(Event)}")
    tenants.check_name(tenant)
    webhook_id, secret = str(ULID()), new_secret()
    with database.write() as connection:
        locks.hold(connection, "webhooks", tenant)  # no constraint stands for these two checks
        mine = (Webhook.tenant == tenant) & (Webhook.state != WebhookState.REMOVED)
        urls = connection.scalars(select(Webhook.url).where(mine)).all()
        if target.url in urls:
            raise Conflict(f"tenant {tenant} has a webhook with this URL already: remove that, or rotate its secret")
        if len(urls) >= MAX_PER_TENANT:
            raise Conflict(f"tenant {tenant} has {len(urls)} webhooks, the limit is {MAX_PER_TENANT}: remove one")
        connection.execute(
            insert(Webhook).values(
                id=webhook_id,
                tenant=tenant,
                url=target.url,
                events=[event.value for event in Event if event in said],
                every_job=every_job,
                state=WebhookState.ACTIVE,
                secret=secret,
                created_at=db_now(),
            )
        )
    return get(database, webhook_id), secret


def list_webhooks(database: Database, tenant: str | None = None) -> list[dict[str, Any]]:
    """The webhooks of one tenant or of all, oldest first, without their secrets."""
    return _describe(database, None, tenant)


def get(database: Database, webhook_id: str, tenant: str | None = None) -> dict[str, Any]:
    """Raises NotFound: no such webhook, or another tenant's, which reads the same."""
    found = _describe(database, webhook_id, tenant)
    if not found:
        raise _no_webhook(webhook_id)
    return found[0]


def remove(database: Database, webhook_id: str, tenant: str | None = None) -> dict[str, Any]:
    """Send it nothing more, and forget its secrets and what it was still to be told.

    The row stays until a purge: a job that is just changing its state may be about to refer to it, and must not fail.

    Raises:
        NotFound: no such webhook, or another tenant's.
    """
    described = get(database, webhook_id, tenant)
    with database.write() as connection:
        changed = connection.execute(
            update(Webhook)
            .where(Webhook.id == described["id"], Webhook.state != WebhookState.REMOVED)
            .values(state=WebhookState.REMOVED, secret="", old_secret=None, old_secret_until=None, removed_at=db_now())
        ).rowcount
        connection.execute(
            delete(WebhookDelivery).where(
                WebhookDelivery.webhook_id == described["id"], WebhookDelivery.state == DeliveryState.PENDING
            )
        )
    if not changed:
        raise _no_webhook(webhook_id)
    return described


def rotate(
    database: Database, webhook_id: str, tenant: str | None = None, *, overlap_s: float = OVERLAP_S
) -> tuple[dict[str, Any], str]:
    """Give it a new secret; the old one signs, too, for `overlap_s`. Returns what `add` does.

    Raises:
        BadInput: an overlap out of bounds.
        NotFound: no such webhook, or another tenant's.
        Conflict: the overlap of the last rotation is not over. Only two secrets sign, so the receiver's, which may be
            the oldest, would end at once. Without an overlap that is what is asked for.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise BadInput(f"the overlap is {overlap_s:g} s: it must be between 0 and {MAX_OVERLAP_S:.0f} (30 days)")
    get(database, webhook_id, tenant)
    secret = new_secret()
    is_free = or_(Webhook.old_secret_until.is_(None), Webhook.old_secret_until <= db_now())
    with database.write() as connection:
        changed = connection.execute(
            update(Webhook)
            .where(Webhook.id == storable(webhook_id), Webhook.state != WebhookState.REMOVED)
            .where(is_free if overlap_s else true())
            .values(
                old_secret=Webhook.secret if overlap_s else None,
                old_secret_until=db_now(literal(overlap_s)) if overlap_s else None,
                secret=secret,
            )
        ).rowcount
    described = get(database, webhook_id, tenant)
    if not changed:
        raise Conflict(
            f"webhook {described['id']} has two secrets already, until {described['old_secret_until']}: rotate it "
            "then, or at once (`--at-once`, overlap_s 0), which ends both"
        )
    return described, secret


def queue_ping(database: Database, webhook_id: str, tenant: str | None = None) -> str:
    """Have the sender deliver a ping; returns its event id.

    Raises:
        NotFound: no such webhook, or another tenant's.
        Conflict: its receiver said that it is gone.
    """
    described = get(database, webhook_id, tenant)
    if described["state"] not in LIVE:
        raise Conflict(f"webhook {described['id']} is gone (410): remove it, and add it again")
    with database.write() as connection:
        return ping(connection, described["id"])


def named(database: Database, url: str, tenant: str) -> str:
    """The id of the tenant's webhook with this address, for a job that names it.

    Raises:
        BadInput: it has none.
    """
    address = parse(url).url
    statement = select(Webhook.id).where(
        Webhook.tenant == storable(tenant), Webhook.url == address, Webhook.state.in_(LIVE)
    )
    with database.read() as connection:
        webhook_id: str | None = connection.scalars(statement).first()
    if webhook_id is None:
        raise BadInput(f"tenant {tenant} has no webhook with this URL: add it first, with `forq webhooks add`")
    return webhook_id


def signing_keys(database: Database, webhook_id: str, tenant: str | None = None) -> SigningKeys:
    """Raises NotFound: no such webhook, or another tenant's."""
    described = get(database, webhook_id, tenant)
    is_overlap = func.coalesce(Webhook.old_secret_until > db_now(), False)
    statement = select(Webhook.url, Webhook.secret, Webhook.old_secret, is_overlap.label("is_overlap"))
    with database.read() as connection:
        row = connection.execute(statement.where(Webhook.id == described["id"])).one()
    return SigningKeys(row.url, keys_of(row))


def keys_of(row: Any) -> tuple[str, ...]:
    """The secrets of a row with `secret`, `old_secret` and `is_overlap`."""
    return (row.secret, row.old_secret) if row.is_overlap and row.old_secret else (row.secret,)


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def _no_webhook(webhook_id: str) -> NotFound:
    return NotFound(f"no webhook {webhook_id[:80]!r}: `forq webhooks list` shows those there are")


def _describe(database: Database, webhook_id: str | None, tenant: str | None) -> list[dict[str, Any]]:
    pending = (
        select(func.count())
        .where(WebhookDelivery.webhook_id == Webhook.id, WebhookDelivery.state == DeliveryState.PENDING)
        .scalar_subquery()
    )
    columns = (
        Webhook.id, Webhook.tenant, Webhook.url, Webhook.events, Webhook.every_job, Webhook.state,
        Webhook.num_failures, Webhook.resume_at, Webhook.created_at, pending.label("num_pending"),
        case((Webhook.old_secret_until > db_now(), Webhook.old_secret_until)).label("old_secret_until"),
    )  # fmt: skip
    statement = select(*columns).where(Webhook.state != WebhookState.REMOVED).order_by(Webhook.id)
    if webhook_id is not None:
        statement = statement.where(Webhook.id == storable(webhook_id))
    if tenant is not None:
        statement = statement.where(Webhook.tenant == storable(tenant))
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return [{name: plain(value) for name, value in row._mapping.items()} for row in rows]
