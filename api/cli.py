"""The command `forq api`: serve the REST API until told to stop."""

import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import structlog

from jobs.errors import BadInput, Unavailable
from jobs.settings import Settings, get_settings

if TYPE_CHECKING:
    import uvicorn

GRACE_S = 15
"""At shutdown, uploads and downloads may go on for this long."""

log = structlog.get_logger()


@click.command()
@click.option("--host", help="Address to bind; default FORQ_API_HOST, or 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to bind; default FORQ_API_PORT, or 8765.")
@click.option(
    "--ssl-certfile", type=click.Path(path_type=Path), metavar="FILE",
    help="Serve TLS with this certificate chain (PEM); default api.ssl_certfile.",
)  # fmt: skip
@click.option(
    "--ssl-keyfile", type=click.Path(path_type=Path), metavar="FILE",
    help="Its private key, unless that is in the same file; default api.ssl_keyfile.",
)  # fmt: skip
@click.option(
    "--insecure-bind",
    is_flag=True,
    help="Allow an address that other machines reach without any key, and any Host header. While no key was ever made, "
    "whoever reaches it can read and submit everything.",
)
def api(
    host: str | None, port: int | None, ssl_certfile: Path | None, ssl_keyfile: Path | None, insecure_bind: bool
) -> None:
    """Serve the REST API; its description is at /openapi.json.

    On an address that other machines reach, it needs a live key (`forq keys create`) and asks everyone for one.

    \b
    Example:
      forq api --port 8765
      curl -F file=@prompts.parquet -F max_tokens=128 http://127.0.0.1:8765/v1/jobs
    """
    from jobs.binding import check_bind, is_loopback
    from jobs.context import open_service

    settings = _with_tls(get_settings(), ssl_certfile, ssl_keyfile)
    host = host if host is not None else settings.api_host
    port = port if port is not None else settings.api_port
    is_guarded = not insecure_bind and not is_loopback(host)
    if is_guarded:
        with open_service() as (_, database):
            check_bind(settings, database, host)
    serve(settings, host, port, any_host=insecure_bind, keys_required=is_guarded)


def _with_tls(settings: Settings, certfile: Path | None, keyfile: Path | None) -> Settings:
    """The settings with the command line's files over them; the two go together."""
    if certfile is None and keyfile is None:
        return settings
    if certfile is None and settings.api.ssl_certfile is None:
        raise BadInput("--ssl-keyfile stands without --ssl-certfile: name the certificate, too")
    files = {"ssl_keyfile": keyfile} if certfile is None else {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    return settings.model_copy(update={"api": settings.api.model_copy(update=files)})


def serve(settings: Settings, host: str, port: int, *, any_host: bool, keys_required: bool) -> None:
    """Run the server until SIGINT or SIGTERM.

    Raises:
        BadInput: the certificate or its key cannot be used.
        Unavailable: the address cannot be bound.
    """
    # Imported here, so that help stays fast.
    import uvicorn

    from api.app import begin_shutdown, create_app
    from jobs import parts
    from jobs.binding import is_loopback
    from jobs.context import open_service
    from jobs.logs import configure_logs

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            begin_shutdown(app)
            await super().shutdown(sockets)

    configure_logs()
    app = create_app(settings, any_host=any_host, keys_required=keys_required)
    tls = settings.api
    password = tls.ssl_keyfile_password
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,  # the root logger's: warnings and worse
        access_log=False,  # a line per poll; state changes are logged by the routes
        server_header=False,
        proxy_headers=bool(tls.trusted_proxies),
        forwarded_allow_ips=list(tls.trusted_proxies),
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=tls.ssl_certfile,
        ssl_keyfile=tls.ssl_keyfile,
        ssl_keyfile_password=password.get_secret_value() if password is not None else None,
    )
    _load(config)
    if tls.ssl_certfile is None and not is_loopback(host):
        log.warning("api_without_tls", host=host, why="keys and prompts cross the network in the clear")
    # uvicorn raises the signal again once it has shut down: then it means a clean exit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with open_service(), _listen(host, port) as listener, parts.registered(settings, "api", host=host, port=port):
        log.info("api_started", host=host, port=port)
        Server(config).run(sockets=[listener])


def _load(config: "uvicorn.Config") -> None:
    """Read the certificate now: uvicorn would end in a traceback."""
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        names = f"{config.ssl_certfile} or {config.ssl_keyfile or 'the private key in it'}"
        reason = error.strerror or type(error).__name__
        raise BadInput(f"{names} cannot be used for TLS ({reason}): give PEM files that belong together") from None


def _listen(host: str, port: int) -> socket.socket:
    """Bound here: uvicorn reports a port in use among its log lines only, and exits with 3."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"{host} port {port} cannot be bound ({reason}): choose another --port") from None
