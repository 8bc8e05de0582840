"""Where the REST API listens, whether it may, and how it is reached from this machine."""

import ipaddress

from db.session import Database
from jobs import keys
from jobs.errors import BadInput
from jobs.settings import Settings


def is_loopback(host: str) -> bool:
    """Whether a host, without its port, is this machine only. Names other than `localhost` count as elsewhere."""
    host = host.removeprefix("[").removesuffix("]")
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(settings: Settings, database: Database, host: str) -> None:
    """Raises BadInput: other machines may reach the address, and no key would keep them out, or none would let in."""
    if is_loopback(host):
        return
    where = f"host is {host!r}, which other machines may reach, and"
    if settings.api.require_keys is False:
        raise BadInput(
            f"{where} api.require_keys is false: remove that, use 127.0.0.1, or run `forq api --insecure-bind`"
        )
    if not keys.any_live_key(database):
        raise BadInput(
            f"{where} there is no live API key: make one with `forq keys create NAME --scope submit --scope read`, "
            "use 127.0.0.1, or run `forq api --insecure-bind`"
        )


def local_url(settings: Settings) -> str:
    """The API of the settings as this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.api_host, settings.api_host)  # noqa: S104
    scheme = "http" if settings.api.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.api_port}"
