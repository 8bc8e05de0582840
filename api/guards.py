"""Two ASGI layers around every route: who may ask, and what happens when a route breaks."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import CRASHED, log_crash, problem
from jobs.binding import is_loopback

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class LoopbackGuard:
    """Answers only for loopback names, and changes nothing on behalf of another web site.

    A loopback port without keys is open to every page in the user's browser: by DNS rebinding (a foreign name in
    `Host`) it could read results, by a plain form (a foreign `Origin`) it could submit jobs. Neither can send a key it
    does not have, so the guard is off where keys are required.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = _refusal(Headers(scope=scope), scope["method"])
            if refusal is not None:
                await problem(403, refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class CrashGuard:
    """Turns an unexpected exception into a 500 problem; Starlette's own layer would log its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception as error:
            log_crash(scope["method"], scope["path"], error)
            if has_started:
                # The server must cut the connection, or the client would take half an answer for a whole one.
                raise RuntimeError("the response broke off; see request_crashed above") from None
            await problem(500, CRASHED)(scope, receive, send)


def _refusal(headers: Headers, method: str) -> str | None:
    host = _hostname(f"//{headers.get('host', '')}")
    if host is None or not is_loopback(host):
        return "this service answers on loopback names only, such as localhost, while api.require_keys is not true"
    origin = headers.get("origin")
    if origin is not None and method not in _SAFE_METHODS:
        origin_host = _hostname(origin)
        if origin_host is None or not is_loopback(origin_host):
            return "a page of another site may not change anything here while api.require_keys is not true"
    return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
