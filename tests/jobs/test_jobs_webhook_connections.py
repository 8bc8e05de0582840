"""Where deliveries connect to: the address that was checked, by its name's certificate, and nowhere else."""

import asyncio
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trustme
from receiver import allowing, receiving
from webhook_steps import only, ping, send

from db.session import Database
from jobs.settings import Settings
from jobs.webhooks.deliveries import Outcome
from jobs.webhooks.posting import make_client, post


def test_an_address_that_is_no_longer_allowed_is_not_connected_to(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        ping(database, allowing(settings, receiver.url), receiver.url)
        send(database, allowing(settings, "https://hooks.example.com/"))
    assert receiver.got == []
    assert "not in webhooks.allow" in only(database)["last_error"]


@pytest.mark.parametrize(
    ("entry", "addresses", "why"),
    [
        ("https://hooks.example.com/", ["127.0.0.1"], "not a public address"),
        ("https://hooks.example.com/", ["10.1.2.3"], "not a public address"),
        ("https://hooks.example.com/", ["93.184.216.34", "10.1.2.3"], "not a public address"),
        ("https://hooks.example.com/", ["::ffff:10.1.2.3"], "not a public address"),
        ({"url": "https://hooks.example.com/", "allow_private": True}, ["169.254.169.254"], "metadata"),
        ("https://hooks.example.com/", [], "has no address"),
    ],
)
def test_a_name_that_leads_where_it_must_not_is_not_connected_to(
    database: Database, settings: Settings, entry: Any, addresses: list[str], why: str
) -> None:
    settings = allowing(settings, entry)
    ping(database, settings, "https://hooks.example.com/")

    async def resolve(host: str, port: int) -> list[Any]:
        assert (host, port) == ("hooks.example.com", 443)
        return [ip_address(address) for address in addresses]

    send(database, settings, resolve=resolve)
    assert why in only(database)["last_error"]


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return authority


@pytest.mark.parametrize(("name", "is_taken"), [("hooks.example.com", True), ("other.example.com", False)])
def test_the_address_that_was_checked_is_connected_to_and_its_certificate_must_be_the_names(
    settings: Settings, authority: trustme.CA, name: str, is_taken: bool
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(tls)
    looked_up: list[str] = []

    async def resolve(host: str, port: int) -> list[Any]:
        looked_up.append(host)
        return [ip_address("127.0.0.1")] if len(looked_up) == 1 else [ip_address("169.254.169.254")]

    async def run(port: int) -> Outcome:
        url = f"https://hooks.example.com:{port}/forq"
        allowed = allowing(settings, {"url": f"https://hooks.example.com:{port}/", "allow_private": True})
        async with make_client() as client:
            return await post(client, allowed.webhooks, url, "{}", {"webhook-id": "evt_1"}, resolve=resolve)

    with receiving(tls=tls) as receiver:
        outcome = asyncio.run(run(receiver.port))
    assert looked_up == ["hooks.example.com"]
    if is_taken:
        assert outcome == Outcome(200)
        assert receiver.got[0].headers["Host"] == f"hooks.example.com:{receiver.port}"
    else:
        assert receiver.got == []
        assert "certificate is not accepted" in str(outcome.error)


def test_a_name_that_nobody_has_is_an_ordinary_failure(settings: Settings) -> None:
    async def run() -> Outcome:
        async with make_client() as client:
            webhooks = allowing(settings, "https://nobody.invalid/").webhooks
            return await post(client, webhooks, "https://nobody.invalid/", "{}", {})

    assert "nobody.invalid" in str(asyncio.run(run()).error)
