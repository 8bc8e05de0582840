"""Who asks, and whether they may: the key of `Authorization: Bearer`, its scope, its rate.

Every route but the probes is included behind `authorize` (api/app.py). Methods that only read need the scope `read`,
all others `submit`, so that a new route cannot be without one.
"""

import asyncio
import ipaddress
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import anyio
import anyio.to_thread
import structlog
from fastapi import Depends, HTTPException, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive

from api.buckets import Buckets
from db.models import DEFAULT_TENANT
from db.session import Database
from jobs import keys
from jobs.api_settings import ApiSettings
from jobs.keys import Scope

READING = ("GET", "HEAD", "OPTIONS")
KEY_PREFIX = "forq_"
OPENAI_PATHS = ("/v1/files", "/v1/batches", "/v1/models")
MAX_BODY_BYTES = 1 << 20
"""Of the routes whose bodies are some values; uploads have limits of their own."""
CLOSE_S = 2.0
NO_KEY = "this service asks for an API key: send it as `Authorization: Bearer forq_...`"

log = structlog.get_logger()
bearer = HTTPBearer(
    scheme_name="key",
    bearerFormat="forq_<id>_<secret>",
    description="A key of `forq keys create`. Its scope `read` or `submit`, and its tenant, decide what it opens.",
    auto_error=False,  # whose error says less than ours
)


@dataclass(frozen=True)
class Caller:
    """Whose request it is."""

    key_id: str | None
    """None without a key, where none is required."""
    tenant: str
    """Of the jobs it makes."""
    sees_all: bool
    """All tenants' jobs, not only its own."""

    @property
    def only_tenant(self) -> str | None:
        return None if self.sees_all else self.tenant


OPERATOR = Caller(key_id=None, tenant=DEFAULT_TENANT, sees_all=True)


class Access:
    """Decides over requests. Belongs to one event loop."""

    def __init__(self, database: Database, settings: ApiSettings, *, always_required: bool) -> None:
        """`always_required`: also where no key was ever made."""
        self._database = database
        self._settings = settings
        self._is_required = always_required
        self._by_key = Buckets(settings.rate_per_minute, settings.rate_burst)
        self._failures = Buckets(settings.failures_per_minute, max(1, settings.failures_per_minute))
        self._noting: dict[str, asyncio.Task[None]] = {}
        self._limiter = anyio.CapacityLimiter(1)

    async def caller(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        """Raises HTTPException: 401 no key or a bad one, 403 the key lacks the scope, 429 too many of either."""
        if credentials is None and "authorization" not in request.headers:
            if await self._asks_for_keys():
                raise _unauthorized(NO_KEY)
            return OPERATOR
        if _is_placeholder(request, credentials) and not await self._asks_for_keys():
            return OPERATOR
        key = await self._verified(request, credentials)
        wait_s = self._by_key.wait_s(key.id, key.rate_per_minute)
        if wait_s > 0:
            raise _too_many("this key asks too often", wait_s)
        self._by_key.take(key.id, key.rate_per_minute)
        if key.use_is_old:
            self._note_use(key.id)
        scope = Scope.READ if request.method in READING else Scope.SUBMIT
        if not key.may(scope):
            raise HTTPException(
                403,
                f"this key has the scope {', '.join(sorted(key.scopes))}, and {request.method} here needs {scope}: "
                "use another key",
                {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
            )
        return Caller(key.id, key.tenant, Scope.ADMIN in key.scopes)

    async def close(self) -> None:
        """Let what is being written end, unless it takes long."""
        if self._noting:
            _, late = await asyncio.wait(self._noting.values(), timeout=CLOSE_S)
            for task in late:
                task.cancel()

    async def _asks_for_keys(self) -> bool:
        if not self._is_required and self._settings.require_keys == "auto":
            # Keys are never deleted, so a yes is for good.
            self._is_required = await run_in_threadpool(keys.any_key, self._database)
        return self._is_required

    async def _verified(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> keys.Key:
        address = _network_of(request.client.host if request.client is not None else "")
        # Before the look at the key: an address that is out of tries must not learn whether the next one is right.
        wait_s = self._failures.wait_s(address)
        if wait_s > 0:
            raise _too_many("too many bad keys came from this address", wait_s)
        presented = keys.parse(credentials.credentials) if credentials is not None else None
        try:
            if presented is None:
                raise keys.KeyRefusedError("this is no key: send `Authorization: Bearer forq_...`, whole and once")
            return await run_in_threadpool(keys.verify, self._database, presented)
        except keys.KeyRefusedError as error:
            self._failures.take(address)
            log.warning("key_refused", key=presented.id if presented is not None else None, address=address)
            raise _unauthorized(str(error), error="invalid_token") from None

    def _note_use(self, key_id: str) -> None:
        """Beside the request, in a thread of its own: on SQLite the write may wait for a submit that holds the lock."""
        if key_id not in self._noting:
            task = self._noting[key_id] = asyncio.create_task(self._write_use(key_id))
            task.add_done_callback(lambda _: self._noting.pop(key_id, None))

    async def _write_use(self, key_id: str) -> None:
        with suppress(SQLAlchemyError):  # the next request tries again
            note = partial(keys.note_use, self._database, key_id)
            await anyio.to_thread.run_sync(note, limiter=self._limiter, abandon_on_cancel=True)


async def authorize(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    if not hasattr(request.state, "caller"):  # `KeyFirstRoute` may have asked
        access: Access = request.app.state.access
        request.state.caller = await access.caller(request, credentials)
    caller: Caller = request.state.caller
    return caller


CallerDep = Annotated[Caller, Depends(authorize)]
"""Worked out once per request, however many ask."""


class KeyFirstRoute(APIRoute):
    """A route whose body FastAPI reads. It does so before any dependency, and to any length: whoever has no key would
    hear what is wrong with it instead of 401, and whoever has one could fill the memory."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_who_may_ask(request: Request) -> Response:
            await authorize(request, await bearer(request))
            return await answer(Request(request.scope, _bounded(request.receive)))

        return answer_who_may_ask


def _bounded(receive: Receive) -> Receive:
    num_bytes = 0

    async def receive_so_many() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is over {MAX_BODY_BYTES} bytes: shorten it")
        return message

    return receive_so_many


def _is_placeholder(request: Request, credentials: HTTPAuthorizationCredentials | None) -> bool:
    """OpenAI's clients cannot go without a key: where none is required, users give them any word."""
    is_openai = request.url.path.startswith(OPENAI_PATHS)
    return is_openai and credentials is not None and not credentials.credentials.startswith(KEY_PREFIX)


def _unauthorized(detail: str, error: str | None = None) -> HTTPException:
    challenge = "Bearer" if error is None else f'Bearer error="{error}"'
    return HTTPException(401, detail, {"WWW-Authenticate": challenge})


def _too_many(what: str, wait_s: float) -> HTTPException:
    seconds = max(1, math.ceil(wait_s))
    return HTTPException(429, f"{what}: try again in {seconds} s", {"Retry-After": str(seconds)})


def _network_of(address: str) -> str:
    """An address, or of version 6 the network that one customer has: its owner could change addresses at will."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 6:
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
