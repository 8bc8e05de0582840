"""Requests that are sent again where that is safe, and errors that say the server's own line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import tenacity

from jobs.client.errors import ApiError, ClientError, UnreachableError, error_for
from jobs.retry_after import seconds_of

NOT_DONE = (429, 503)
"""The service says that it did nothing, so anything may be sent again."""
PROXY_FAILED = (502, 504)
"""Whether it was done is not known."""
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 15.0
CONNECT_S = 10.0

T = TypeVar("T")


class Transport:
    """One connection pool, the key, and how long to try."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float, retry_for_s: float) -> None:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url is {base_url!r}: write http://HOST:PORT or https://HOST")
        if url.userinfo:
            raise ValueError("base_url has a user in it: give the key as api_key")
        if api_key is not None and not is_visible(api_key):  # which is not repeated
            raise ValueError("api_key has a character that no key has, such as a line break at its end: strip() it")
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        # Redirects are not followed: they could carry the key elsewhere.
        self._http = httpx.Client(base_url=url, headers=headers, timeout=self._timeout(timeout_s))

    def close(self) -> None:
        self._http.close()

    def get(
        self, path: str, *, wait_s: float = 0.0, headers: dict[str, str] | None = None, **query: Any
    ) -> httpx.Response:
        """`wait_s`: how long the server may take on purpose."""
        params = {name: _text(value) for name, value in query.items() if value is not None}
        timeout = self._timeout(self._timeout_s + wait_s)
        return self.again(
            lambda: _checked(self._http.get(path, params=params, headers=headers, timeout=timeout)), is_repeatable=True
        )

    def post(self, path: str, **values: Any) -> httpx.Response:
        """Something that must not be done twice: it is sent again only where it cannot have been done."""
        return self.again(lambda: _checked(self._http.post(path, **values)), is_repeatable=False)

    def post_repeatable(
        self, path: str, send: Callable[[Callable[..., httpx.Response]], httpx.Response]
    ) -> httpx.Response:
        """Something that the server recognises; `send` is called with `post` for each try, and makes its body anew."""

        def post(**values: Any) -> httpx.Response:
            return self._http.post(path, **values)

        return self.again(lambda: _checked(send(post)), is_repeatable=True)

    @contextmanager
    def stream(self, path: str, **query: Any) -> Iterator[httpx.Response]:
        """One try of a download; wrap what reads it in `again`."""
        params = {name: _text(value) for name, value in query.items() if value is not None}
        with self._http.stream("GET", path, params=params) as response:
            if response.is_error:
                response.read()
            yield _checked(response)

    def again(self, attempt: Callable[[], T], *, is_repeatable: bool) -> T:
        """Call until it succeeds, may not be repeated, or `retry_for_s` has been waited.

        Raises:
            ClientError: the last try's.
        """

        def may_help(error: BaseException) -> bool:
            if isinstance(error, ApiError):
                return error.status in NOT_DONE or (is_repeatable and error.status in PROXY_FAILED)
            if isinstance(error, httpx.LocalProtocolError):
                return False  # what cannot be sent cannot be sent later
            # Before there is a connection, nothing was sent.
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                return True
            # Whoever was silent for the whole timeout would be so again.
            return (
                is_repeatable and isinstance(error, httpx.TransportError) and not isinstance(error, httpx.ReadTimeout)
            )

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_help),
            stop=lambda state: state.idle_for + state.upcoming_sleep > self._retry_for_s,
            wait=_wait_s,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except httpx.LocalProtocolError:  # its text may be that of a header, and so the key
            raise ClientError("the request cannot be sent: a value of it has a character that HTTP forbids") from None
        except httpx.TransportError as error:
            kind, text = type(error).__name__, str(error)
            where = f"{self._http.base_url.host}:{self._http.base_url.port or self._http.base_url.scheme}"
            raise UnreachableError(
                f"{where} gave no answer ({kind}{f': {text}' if text else ''}): check the address and that it runs"
            ) from error
        except httpx.HTTPError as error:
            raise ClientError(f"the request failed ({type(error).__name__})") from error

    def _timeout(self, timeout_s: float) -> httpx.Timeout:
        return httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))


def is_visible(text: str) -> bool:
    """Whether a header can carry it as it is: printable ASCII without spaces, and not empty."""
    return text != "" and all("!" <= char <= "~" for char in text)


_backoff = tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """What the server asks for, else longer each time; a random part keeps many clients apart."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.retry_after_s if isinstance(error, ApiError) else None
    return max(asked or 0.0, _backoff(state))


def _checked(response: httpx.Response) -> httpx.Response:
    """Raises ApiError: the answer is a problem, or comes from something that is not forq."""
    if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
        return response
    detail, values = "", None
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        try:
            problem = response.json()
            detail, values = str(problem["detail"]), problem.get("errors")
        except (ValueError, KeyError, TypeError):
            pass
    if not detail:
        detail = f"{response.request.url.host} answered {response.status_code}, and not as forq does: check the address"
    raise error_for(response.status_code, detail, seconds_of(response.headers.get("retry-after")), values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
