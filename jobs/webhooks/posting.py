"""One attempt: look the name up, refuse what it must not lead to, connect to exactly that address, sign, post.

httpx is given the address that was checked instead of the name, so no second look-up can lead elsewhere; the name goes
into the Host header, and for https into SNI and the certificate's check. Redirects are not followed, proxies of the
environment not used, and of the answer's body a few KiB are read and thrown away.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jobs.errors import BadInput
from jobs.retry_after import seconds_of
from jobs.webhook_settings import WebhookSettings
from jobs.webhooks.deliveries import Outcome
from jobs.webhooks.urls import Address, Target, check_allowed, parse, refusal_of

if TYPE_CHECKING:
    import httpx

MAX_BODY_BYTES = 4096
BODY_S = 1.0
"""So long the answer's body may take; the status has decided by then."""
MAX_ADDRESSES = 4
"""Of one name, tried in turn while they refuse the connection."""
USER_AGENT = "forq-webhooks/1"

Resolve = Callable[[str, int], Awaitable[list[Address]]]


def make_client() -> "httpx.AsyncClient":
    """The client for all attempts of a sender. `SSL_CERT_FILE` and `SSL_CERT_DIR` name other authorities."""
    import httpx

    return httpx.AsyncClient(
        verify=httpx.create_ssl_context(),
        follow_redirects=False,
        trust_env=False,  # a proxy would look names up by itself
        # No connection is used twice: it would be found by its address, and two names may lead to one.
        limits=httpx.Limits(max_keepalive_connections=0),
        headers={"User-Agent": USER_AGENT, "Connection": "close"},
    )


async def post(
    client: "httpx.AsyncClient",
    settings: WebhookSettings,
    url: str,
    body: str,
    headers: dict[str, str],
    *,
    resolve: Resolve | None = None,
) -> Outcome:
    """Send a body to a webhook; every way it can go wrong is an outcome, in words without the URL's path."""
    try:
        target = parse(url)
        allow_private = check_allowed(target, settings.allowed).allow_private
    except BadInput as error:  # the allow-list may be another than when it was added
        return Outcome(error=str(error))
    try:
        async with asyncio.timeout(settings.timeout_s):
            addresses = await (resolve or resolve_name)(target.host, target.port)
            for address in addresses:
                refusal = refusal_of(address, allow_private=allow_private)
                if refusal is not None:  # one of several is enough: whoever answers for the name is not to be trusted
                    return Outcome(error=f"{target.host}: {refusal}")
            return await _post_to(client, settings, target, addresses[:MAX_ADDRESSES], body, headers)
    except TimeoutError:
        return Outcome(error=f"{target.origin} did not answer within {settings.timeout_s:g} s (webhooks.timeout_s)")
    except OSError as error:  # the look-up
        reason = error.strerror or type(error).__name__
        return Outcome(error=f"{target.host} cannot be found ({reason})")


async def _post_to(
    client: "httpx.AsyncClient",
    settings: WebhookSettings,
    target: Target,
    addresses: list[Address],
    body: str,
    headers: dict[str, str],
) -> Outcome:
    import httpx

    outcome = Outcome(error=f"{target.host} has no address")
    for address in addresses:
        request = client.build_request(
            "POST",
            httpx.URL(
                scheme=target.scheme, host=str(address), port=target.port, raw_path=target.request_target.encode()
            ),
            content=body.encode(),
            headers={**headers, "Host": target.authority, "Content-Type": "application/json"},
            timeout=httpx.Timeout(settings.timeout_s, connect=settings.connect_timeout_s),
            extensions={"sni_hostname": target.host},
        )
        try:
            response = await client.send(request, stream=True)
        except httpx.ConnectTimeout:
            outcome = Outcome(error=f"{target.origin} cannot be connected to within {settings.connect_timeout_s:g} s")
        except httpx.ConnectError as error:
            outcome = Outcome(error=f"{target.origin} cannot be connected to ({_reason(error)})")
        except httpx.HTTPError as error:
            return Outcome(error=f"{target.origin} broke off ({type(error).__name__})")
        else:
            try:
                await _discard(response)
                return _judge(response)
            finally:
                await response.aclose()
    return outcome


async def _discard(response: "httpx.Response") -> None:
    """Read a little, so that an ordinary receiver can finish writing."""
    import httpx

    num_bytes = 0
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(BODY_S):
            async for chunk in response.aiter_raw():
                num_bytes += len(chunk)
                if num_bytes >= MAX_BODY_BYTES:
                    return


def _judge(response: "httpx.Response") -> Outcome:
    status = response.status_code
    if 200 <= status < 300:
        return Outcome(status)
    if 300 <= status < 400:
        return Outcome(status, f"answered {status}: redirects are not followed, name the address it leads to")
    return Outcome(status, f"answered {status}", seconds_of(response.headers.get("retry-after")))


def _reason(error: BaseException | None) -> str:
    """What the system said, from the innermost cause: the libraries' own texts may hold the address and more."""
    found = "no connection"
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {error.verify_message}"
        if isinstance(error, ssl.SSLError):
            return f"TLS: {error.reason or type(error).__name__}"
        if isinstance(error, OSError) and error.errno is not None:
            found = error.strerror or found
        error = error.__cause__ or error.__context__
    return found


async def resolve_name(host: str, port: int) -> list[Address]:
    """All addresses of a name. In a daemon `threading.Thread`: a name server that is silent must delay no shutdown.

    Raises:
        OSError: the name has none.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Address]] = loop.create_future()

    def tell(result: Any) -> None:
        if not found.done():
            found.set_exception(result) if isinstance(result, OSError) else found.set_result(result)

    def look() -> None:
        result: Any
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = [ipaddress.ip_address(info[4][0]) for info in infos]
        except OSError as error:
            result = error
        except ValueError:  # UnicodeError of a label that is too long
            result = OSError(0, "no valid name")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=look, name="webhook-lookup", daemon=True).start()
    return await found


def signed_headers(secrets: tuple[str, ...], event_id: str, body: str, now: datetime) -> dict[str, str]:
    """The three headers of Standard Webhooks; after a rotation with a signature of each secret."""
    from standardwebhooks import Webhook

    signatures = [Webhook(secret).sign(event_id, now, body) for secret in secrets]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
