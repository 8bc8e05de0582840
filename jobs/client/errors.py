"""What can go wrong between a client and the service; each message is one line, the server's own where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.client.replies import JobStatus


class ClientError(Exception):
    """Base of all errors of this package."""


class UnreachableError(ClientError):
    """No answer came: nobody listens, the connection broke, or it took longer than the timeout."""


class StillRunningError(ClientError):
    """The wait is over and the job is not; `status` is its last one."""

    def __init__(self, status: JobStatus, timeout_s: float) -> None:
        super().__init__(f"job {status.job_id} is still {status.state} after {timeout_s:g} s: wait longer")
        self.status = status


class ApiError(ClientError):
    """The service answered with a problem (RFC 9457)."""

    def __init__(self, status: int, detail: str, retry_after_s: float | None = None, values: Any = None) -> None:
        super().__init__(detail)
        self.status = status
        """The HTTP status."""
        self.detail = detail
        self.retry_after_s = retry_after_s
        """Seconds after which the same may work, where the server says so."""
        self.values: list[dict[str, str]] = values or []
        """Each refused value, `{"where", "message"}`, where there are several."""


class RefusedError(ApiError):
    """The file or a value cannot be used (400, 406, 413, 415, 422): the message says value, limit and remedy."""


class NotAllowedError(ApiError):
    """No key, a bad one, or one that lacks the scope (401, 403)."""


class NotFoundError(ApiError):
    """No such job (404), or another tenant's."""


class ConflictError(ApiError):
    """The job's state does not allow this, or an idempotency key belongs to another submit (409)."""


class TooManyError(ApiError):
    """Too many requests of this key, or too much of this tenant in the queue (429)."""


class ServiceError(ApiError):
    """The service, or a part of it, cannot do this now (5xx)."""


def error_for(status: int, detail: str, retry_after_s: float | None = None, values: Any = None) -> ApiError:
    kinds: dict[int, type[ApiError]] = {
        401: NotAllowedError,
        403: NotAllowedError,
        404: NotFoundError,
        409: ConflictError,
        429: TooManyError,
    }
    kind = ServiceError if status >= 500 else kinds.get(status, RefusedError)
    return kind(status, detail, retry_after_s, values)
