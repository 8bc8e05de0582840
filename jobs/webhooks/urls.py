"""Where webhooks may point: how an address is read, the operator's allow-list, and which IP addresses are refused.

A webhook's address comes from whoever may submit, and it is this service that connects to it. So the operator lists
what may be named, and what a listed name leads to is looked at again before every connection.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from jobs.errors import BadInput

MAX_URL_CHARS = 2048
_PLAIN = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:.]+")
_DOTS = re.compile(r"(\.|%2e){1,2}", re.IGNORECASE)
_PORTS = {"https": 443, "http": 80}
_WITH_IPV4 = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
"""NAT64 of the world and of a site (RFC 8215), the old compatible and the translated form: the last 32 bits are an IPv4
address."""
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Above the IPv4 address, in the last 64 bits (RFC 5214)."""
_METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")))
"""Where clouds hand out a machine's credentials, outside the link-local networks. Those are refused as a whole."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Target:
    """An address in its parts, as they are connected to: nothing is parsed a second time, by another's rules."""

    scheme: str
    host: str
    """Lower case, without brackets."""
    port: int
    path: str
    query: str

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """What may be logged: a path may hold the receiver's own token."""
        return f"{self.scheme}://{self.authority}"

    @property
    def request_target(self) -> str:
        return self.path + (f"?{self.query}" if self.query else "")

    @property
    def url(self) -> str:
        return self.origin + self.request_target


@dataclass(frozen=True, slots=True)
class Allowed:
    """One entry of the allow-list: an origin, and a path below which addresses may lie."""

    target: Target
    allow_private: bool

    def covers(self, other: Target) -> bool:
        mine = self.target
        if (mine.scheme, mine.host, mine.port) != (other.scheme, other.host, other.port):
            return False
        prefix = mine.path.rstrip("/")
        return other.path == mine.path or other.path.startswith(prefix + "/")


def parse(url: str) -> Target:
    """Read an address strictly: what one program may read as one host and another as another is refused.

    Raises:
        BadInput: it cannot be a webhook's, wherever it leads.
    """
    if len(url) > MAX_URL_CHARS:
        raise BadInput(f"the webhook's URL has {len(url)} characters, the limit is {MAX_URL_CHARS}")
    if not _PLAIN.fullmatch(url) or "\\" in url:
        raise BadInput("the webhook's URL has spaces, backslashes or other than plain characters: percent-encode them")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadInput("the webhook's URL has no valid host and port: write https://HOST/PATH") from None
    if parts.scheme not in _PORTS:
        raise BadInput("the webhook's URL must begin with https:// (http:// for a listed loopback host)")
    if "@" in parts.netloc:
        raise BadInput("the webhook's URL has a user or password: remove it; deliveries are signed instead")
    if "#" in url:
        raise BadInput("the webhook's URL has a fragment (#): remove it")
    host = parts.hostname or ""
    if not _HOST.fullmatch(host) or ".." in host or port == 0 or parts.netloc.endswith(":"):
        raise BadInput("the webhook's URL has no valid host and port: write https://HOST/PATH")
    path = parts.path or "/"
    if any(_DOTS.fullmatch(segment) for segment in re.split(r"/|%2f|%5c", path, flags=re.IGNORECASE)):
        raise BadInput("the webhook's URL has a path with . or ..: write the path it leads to")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path, parts.query)


def parse_allowed(url: str, *, allow_private: bool) -> Allowed:
    """Read an entry of the allow-list.

    Raises:
        BadInput: plain http beyond this machine, a query, or no address at all.
    """
    target = parse(url)
    if target.query or "?" in url:
        raise BadInput("an allowed webhook is an origin or a path below it: remove the query")
    if target.scheme == "http" and not target.is_loopback:
        raise BadInput(f"{target.origin} is plain http, which only a loopback host may be: write https://")
    return Allowed(target, allow_private or target.is_loopback)


def check_allowed(target: Target, allowed: Iterable[Allowed]) -> Allowed:
    """The entry that covers an address.

    Raises:
        BadInput: none does.
    """
    entries = list(allowed)
    if not entries:
        raise BadInput("no webhook is allowed here: the operator lists what may be, in webhooks.allow")
    for entry in sorted(entries, key=lambda entry: not entry.allow_private):
        if entry.covers(target):
            return entry
    if any(entry.target.origin == target.origin for entry in entries):
        raise BadInput(f"of {target.origin}, webhooks.allow does not have this path: use another, or ask the operator")
    listed = ", ".join(sorted({entry.target.origin for entry in entries}))
    raise BadInput(f"{target.origin} is not in webhooks.allow, which has {listed}: ask the operator")


def refusal_of(address: Address, *, allow_private: bool) -> str | None:
    """Why an address that a host's name led to is not connected to; None where it may be."""
    for found in (address, *_embedded(address)):
        if found.is_link_local or found.is_multicast or found.is_unspecified or found in _METADATA:
            return f"{address} is a link-local, metadata or group address, which no webhook may have"
        is_public = found.is_global and not (found.version == 6 and found.is_site_local)
        if not is_public and not allow_private:
            return f"{address} is not a public address: list its origin in webhooks.allow with allow_private = true"
    return None


def _embedded(address: Address) -> list[Address]:
    """The IPv4 addresses that gateways make of an IPv6 one: the way round the rules above."""
    if address.version == 4:
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    number = int(address)
    if any(address in network for network in _WITH_IPV4) or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        found.append(ipaddress.IPv4Address(number & 0xFFFFFFFF))
    return [inner for inner in found if inner is not None]
