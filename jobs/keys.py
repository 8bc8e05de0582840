"""Keys of the REST API. A key is `forq_<id>_<secret>`: the id finds its row, the secret proves it.

The database has a SHA-256 of the secret and nothing that leads back to it. A slow hash would protect secrets that
people think of; these are 256 random bits, which nobody guesses at any speed, and every request would pay for it.

A key's row is never deleted: an API that began to ask for keys must not stop because its last key was revoked.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, insert, literal, or_, select, update
from ulid import ULID

from db.clock import db_now, plain
from db.models import DEFAULT_TENANT, ApiKey
from db.session import Database
from jobs import tenants
from jobs.errors import BadInput, ForqError, NotFound
from jobs.messages import storable

SECRET_BYTES = 32
MAX_NAME_CHARS = 200
MAX_RATE_PER_MINUTE = 1_000_000
USED_EVERY_S = 60.0
"""`last_used_at` is written at most this often per key: a request must not cost a write."""

_KEY = re.compile(r"forq_([0-9A-HJKMNP-TV-Z]{26})_([A-Za-z0-9_-]{43})", re.ASCII)
_NO_SECRET = hashlib.sha256(b"").hexdigest()
"""No key's: compared with where there is no row."""


class Scope(StrEnum):
    """What a key may do."""

    SUBMIT = "submit"
    """Create, cancel and retry jobs of its tenant."""
    READ = "read"
    """See status, lists, results, statistics and trees of its tenant."""
    ADMIN = "admin"
    """Both, for every tenant's jobs."""


@dataclass(frozen=True)
class Presented:
    """A key as a client sent it; of its secret, the hash alone."""

    id: str
    secret_sha256: str = field(repr=False)


@dataclass(frozen=True)
class Key:
    """A key that has proved itself."""

    id: str
    tenant: str
    scopes: frozenset[str]
    rate_per_minute: int | None
    use_is_old: bool
    """Whether `last_used_at` should be written again."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


class KeyRefusedError(ForqError):
    """The key does not open anything. The message is for whoever sent it and holds nothing of the secret."""


def create(
    database: Database,
    name: str,
    scopes: Iterable[str],
    *,
    tenant: str = DEFAULT_TENANT,
    expires_s: float | None = None,
    rate_per_minute: int | None = None,
) -> tuple[dict[str, Any], str]:
    """Make a key. Returns what `list_keys` says of it, and the key itself, which nothing can show again.

    Raises:
        BadInput: a name, tenant, scope, or rate that cannot be used.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise BadInput(f"the name must have 1 to {MAX_NAME_CHARS} printable characters")
    said = set(scopes)
    if not said or not said <= set(Scope):
        raise BadInput(f"the scopes are {', '.join(sorted(said)) or 'none'}: give one or more of {', '.join(Scope)}")
    if rate_per_minute is not None and not 1 <= rate_per_minute <= MAX_RATE_PER_MINUTE:
        raise BadInput(f"the rate is {rate_per_minute} per minute: it must be between 1 and {MAX_RATE_PER_MINUTE:,}")
    key_id, secret = str(ULID()), secrets.token_urlsafe(SECRET_BYTES)
    with database.write() as connection:
        connection.execute(
            insert(ApiKey).values(
                id=key_id,
                name=storable(name),
                tenant=tenants.check_name(tenant),
                scopes=[scope.value for scope in Scope if scope in said],
                secret_sha256=_hash(secret),
                rate_per_minute=rate_per_minute,
                created_at=db_now(),
                expires_at=None if expires_s is None else db_now(literal(expires_s)),
            )
        )
    return _one(database, key_id), f"forq_{key_id}_{secret}"


def list_keys(database: Database) -> list[dict[str, Any]]:
    """All keys there ever were, oldest first: id, name, tenant, scopes, state, rate and times."""
    return _describe(database)


def revoke(database: Database, key_id: str) -> dict[str, Any]:
    """End a key, for good; of one that is revoked already, the first time stays.

    Raises:
        NotFound: no such key.
    """
    key_id = storable(key_id)
    with database.write() as connection:
        connection.execute(
            update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=db_now())
        )
    return _one(database, key_id)


def any_key(database: Database) -> bool:
    """Whether a key was ever made, whatever became of it."""
    with database.read() as connection:
        return bool(connection.execute(select(exists().select_from(ApiKey))).scalar_one())


def any_live_key(database: Database) -> bool:
    with database.read() as connection:
        return bool(connection.execute(select(exists().select_from(ApiKey).where(_is_live()))).scalar_one())


def parse(text: str) -> Presented | None:
    """Read a key; None for a text that can be none."""
    match = _KEY.fullmatch(text)
    return Presented(match[1], _hash(match[2])) if match else None


def verify(database: Database, presented: Presented) -> Key:
    """The key's row, if its secret is right and it is still good.

    An id that does not exist costs the same as a wrong secret, one query and one comparison, and reads the same. Only
    whoever has the right secret learns that a key is revoked or expired.

    Raises:
        KeyRefusedError: it opens nothing.
    """
    is_expired = and_(ApiKey.expires_at.is_not(None), ApiKey.expires_at <= db_now())
    statement = select(ApiKey.__table__, is_expired.label("is_expired"), _use_is_old().label("use_is_old"))
    with database.read() as connection:
        row = connection.execute(statement.where(ApiKey.id == presented.id)).one_or_none()
    is_right = hmac.compare_digest(row.secret_sha256 if row is not None else _NO_SECRET, presented.secret_sha256)
    if row is None or not is_right:
        raise KeyRefusedError("this key is unknown: check it, or ask the operator for a new one")
    if row.revoked_at is not None:
        raise KeyRefusedError("this key has been revoked: ask the operator for a new one")
    if row.is_expired:
        raise KeyRefusedError(f"this key expired at {row.expires_at:%Y-%m-%d %H:%M:%S} UTC: ask for a new one")
    return Key(row.id, row.tenant, frozenset(row.scopes), row.rate_per_minute, bool(row.use_is_old))


def note_use(database: Database, key_id: str) -> bool:
    """Write `last_used_at`, unless somebody did so within `USED_EVERY_S`; says whether it was written."""
    with database.write() as connection:
        return (
            connection.execute(
                update(ApiKey).where(ApiKey.id == key_id, _use_is_old()).values(last_used_at=db_now())
            ).rowcount
            > 0
        )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _use_is_old() -> ColumnElement[bool]:
    return or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < db_now(literal(-USED_EVERY_S)))


def _is_live() -> ColumnElement[bool]:
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > db_now()))


def _one(database: Database, key_id: str) -> dict[str, Any]:
    found = _describe(database, key_id)
    if not found:
        raise NotFound(f"no key {key_id[:80]!r}: `forq keys list` shows those there are")
    return found[0]


def _describe(database: Database, key_id: str | None = None) -> list[dict[str, Any]]:
    statement = select(ApiKey.__table__, db_now().label("now")).order_by(ApiKey.id)
    if key_id is not None:
        statement = statement.where(ApiKey.id == key_id)
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return [
        {
            "id": row.id,
            "name": row.name,
            "tenant": row.tenant,
            "scopes": row.scopes,
            "state": _state(row),
            "rate_per_minute": row.rate_per_minute,
            **{name: plain(getattr(row, name)) for name in ("created_at", "expires_at", "revoked_at", "last_used_at")},
        }
        for row in rows
    ]


def _state(row: Any) -> str:
    if row.revoked_at is not None:
        return "revoked"
    return "expired" if row.expires_at is not None and row.expires_at <= row.now else "live"
