"""Errors as problem details (RFC 9457), with the status each kind of error deserves.

No text of an unexpected exception leaves this module, neither to the client nor to the log: database drivers put
parameters, and so prompts, into their messages.
"""

import errno
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match

from api.forms import SubmitForm
from jobs.errors import BadInput, Conflict, ForqError, LeaseLost, NotFound, QueueFull, Unavailable
from jobs.flags import keys_for_flags
from jobs.logs import place_of

MEDIA_TYPE = "application/problem+json"
CRASHED = "the service failed on this request; its log says where"
RETRY_AFTER_S = 5
RETRY_FULL_QUEUE_AFTER_S = 60
_OLD_SCHEMA = ("42P01", "42703")
"""PostgreSQL's undefined table and column; SQLite reports them as OperationalError."""
STATUS_OF: dict[type[ForqError], int] = {
    BadInput: 422,
    NotFound: 404,
    Conflict: 409,
    LeaseLost: 409,
    QueueFull: 429,
    Unavailable: 503,
}
_MEANINGS = {
    400: "The request is malformed.",
    401: "No API key, or one that opens nothing.",
    403: "The key lacks the scope; or the request comes from another site, or names a host not answered for.",
    404: "No such job or row.",
    406: "None of the accepted media types can be produced.",
    409: "The job's state does not allow this.",
    413: "The upload is larger than `limits.max_upload_bytes`, or another body than its limit.",
    415: "The body is not `multipart/form-data`.",
    422: "A value is refused; `detail` says value, limit and remedy.",
    429: "Too many requests of this key, bad keys from this address, or jobs of this tenant; try again after "
    "`Retry-After` seconds.",
    500: "A fault of the service; its log has the place.",
    503: "A part of the service cannot be reached; try again after `Retry-After` seconds.",
}

log = structlog.get_logger()


def problem(status: int, detail: str, *, headers: dict[str, str] | None = None, **extra: Any) -> Response:
    """A problem response. `type` is `about:blank`: the status says all that a program needs to decide."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **extra}
    if status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S), **(headers or {})}
    return Response(json.dumps(body), status, headers, MEDIA_TYPE)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route that may answer with these problems; the schema is added by `api.app`."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    for kind, handler in _HANDLERS:
        app.add_exception_handler(kind, handler)


async def respond(request: Request, error: Exception) -> Response:
    """The problem of any exception; for routes that write problems in another form."""
    for kind, handler in _HANDLERS:
        if isinstance(error, kind):
            return await handler(request, error)
    log_crash(request.method, request.url.path, error)
    return problem(500, CRASHED)


def log_crash(method: str, path: str, error: BaseException) -> None:
    """One line with the exception's type and place, without its text."""
    log.error("request_crashed", method=method, path=path, error=type(error).__name__, where=place_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    details = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}
    is_bare = error.detail == HTTPStatus(error.status_code).phrase
    detail = details.get(error.status_code, error.detail) if is_bare else error.detail
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 405:
        headers = {"Allow": ", ".join(_methods_of(request))}
    return problem(error.status_code, detail, headers=headers)


def _methods_of(request: Request) -> list[str]:
    """What the path may be asked; Starlette knows only the methods of the first route that has it."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


async def _refused_values(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Without the values: a form field may be a template with a user's text in it.
    errors = [
        {"where": ".".join(str(part) for part in fault["loc"]), "message": fault["msg"].removeprefix("Value error, ")}
        for fault in error.errors()
    ]
    detail = "; ".join(f"{fault['where']}: {fault['message']}" for fault in errors)
    return problem(422, detail, errors=errors)


async def _forq_error(request: Request, error: Exception) -> Response:
    for kind, status in STATUS_OF.items():
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_FULL_QUEUE_AFTER_S)} if kind is QueueFull else None
            return problem(status, keys_for_flags(str(error), SubmitForm.model_fields), headers=headers)
    log_crash(request.method, request.url.path, error)
    return problem(500, CRASHED)


async def _disk_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        log_crash(request.method, request.url.path, error)
        return problem(500, CRASHED)
    log.error("disk_full", method=request.method, path=request.url.path)
    return problem(503, "the server's disk is full: nothing of this request was kept, try again later")


async def _database_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ProgrammingError) and getattr(error.orig, "sqlstate", None) not in _OLD_SCHEMA:
        log_crash(request.method, request.url.path, error)  # a fault in our SQL, which no waiting mends
        return problem(500, CRASHED)
    cause = getattr(error, "orig", None) or error
    request.app.state.database_outage.note(cause, request.method, request.url.path)
    return problem(503, "the database cannot be reached, is busy or is not at the newest schema: see /readyz")


_HANDLERS: tuple[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]], ...] = (
    (HTTPException, _http_error),
    (RequestValidationError, _refused_values),
    (ForqError, _forq_error),
    (OSError, _disk_error),
    *((kind, _database_error) for kind in (OperationalError, InterfaceError, ProgrammingError, PoolTimeout)),
)
