"""The command `forq api`: serve the REST API until told to stop."""

import signal
import socket
import sys

import click
import structlog

from jobs.errors import BadInput, Unavailable
from jobs.settings import Settings, get_settings

GRACE_S = 15
"""At shutdown, uploads and downloads may go on for this long."""

log = structlog.get_logger()


@click.command()
@click.option("--host", help="Address to bind; default FORQ_API_HOST, or 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to bind; default FORQ_API_PORT, or 8765.")
@click.option(
    "--insecure-bind",
    is_flag=True,
    help="Allow an address that other machines reach, and any Host header. The API has no keys yet: whoever reaches "
    "it can read and submit everything.",
)
def api(host: str | None, port: int | None, insecure_bind: bool) -> None:
    """Serve the REST API; its description is at /openapi.json.

    \b
    Example:
      forq api --port 8765
      curl -F file=@prompts.parquet -F max_tokens=128 http://127.0.0.1:8765/v1/jobs
    """
    from api.guards import is_loopback

    settings = get_settings()
    host = host if host is not None else settings.api_host
    port = port if port is not None else settings.api_port
    if not insecure_bind and not is_loopback(host):
        raise BadInput(
            f"host is {host!r}, which other machines may reach, and the API has no keys yet: "
            "use 127.0.0.1 behind a proxy that asks for them, or say --insecure-bind"
        )
    serve(settings, host, port, any_host=insecure_bind)


def serve(settings: Settings, host: str, port: int, *, any_host: bool) -> None:
    """Run the server until SIGINT or SIGTERM.

    Raises:
        Unavailable: the address cannot be bound.
    """
    # Imported here, so that help stays fast.
    import uvicorn

    from api.app import begin_shutdown, create_app
    from jobs import parts
    from jobs.context import open_service
    from jobs.logs import configure_logs

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            begin_shutdown(app)
            await super().shutdown(sockets)

    configure_logs()
    app = create_app(settings, any_host=any_host)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,  # the root logger's: warnings and worse
        access_log=False,  # a line per poll; state changes are logged by the routes
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    # uvicorn raises the signal again once it has shut down: then it means a clean exit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with open_service(), _listen(host, port) as listener, parts.registered(settings, "api", host=host, port=port):
        log.info("api_started", host=host, port=port)
        Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bound here: uvicorn reports a port in use among its log lines only, and exits with 3."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"{host} port {port} cannot be bound ({reason}): choose another --port") from None
