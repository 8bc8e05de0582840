"""Errors in OpenAI's form: its clients show `error.message` and decide by the status.

A status that the client would retry (409) is not used for what no retry mends.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from api import problems

_STATUS_OF = {409: 400, 422: 400}
_CODES = {400: "invalid_value", 401: "invalid_api_key", 403: "insufficient_scope", 404: "not_found",
          413: "file_too_large", 415: "invalid_content_type", 429: "rate_limit_exceeded"}  # fmt: skip
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_MEANINGS = {
    400: "A value is refused, or the batch's state does not allow this.",
    401: "No API key, or one that opens nothing.",
    403: "The key lacks the scope.",
    404: "No such file or batch of this tenant.",
    413: "The upload is larger than `limits.max_upload_bytes`, or another body than its limit.",
    415: "The body is not `multipart/form-data`.",
    429: "Too many requests of this key, or bad keys from this address, or too much of this tenant in the queue.",
    500: "A fault of the service; its log has the place.",
    503: "A part of the service cannot be reached; try again.",
}


class ErrorBody(BaseModel):
    message: str
    type: str = Field(examples=["invalid_request_error"])
    param: str | None
    code: str | None


class OpenAiError(BaseModel):
    """An error as OpenAI writes it."""

    error: ErrorBody


class OpenAiRoute(APIRoute):
    """A route whose every error, those of its key and its values included, is in OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_say_why(request: Request) -> Response:
            try:
                return await answer(request)
            except ClientDisconnect:
                raise  # nobody is left to answer
            except Exception as error:
                return _as_openai(await problems.respond(request, error))

        return answer_or_say_why


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route that may answer with these."""
    return {status: {"description": _MEANINGS[status], "model": OpenAiError} for status in statuses}


def _as_openai(response: Response) -> Response:
    problem = json.loads(bytes(response.body))
    status = _STATUS_OF.get(problem["status"], problem["status"])
    refused = problem.get("errors") or []
    body = {
        "message": problem["detail"],
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": refused[0]["where"].removeprefix("body.").removeprefix("query.") if refused else None,
        "code": _CODES.get(status),
    }
    kept = ("www-authenticate", "retry-after")
    headers = {name: response.headers[name] for name in kept if name in response.headers}
    return Response(json.dumps({"error": body}), status, headers, "application/json")
