"""Where webhooks may point: how addresses are read, what the allow-list covers, which IP addresses are refused."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.errors import BadInput
from jobs.webhook_settings import WebhookSettings
from jobs.webhooks.urls import check_allowed, parse, refusal_of

ALLOW = ["https://hooks.example.com/forq/", "https://other.example.com:8443", "http://127.0.0.1:9000/in"]


def settings(*allow: object) -> WebhookSettings:
    return WebhookSettings.model_validate({"allow": list(allow)})


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/forq/",
        "https://hooks.example.com/forq/a/b?token=1",
        "https://HOOKS.example.com:443/forq/x",
        "https://other.example.com:8443",
        "https://other.example.com:8443/anything",
        "http://127.0.0.1:9000/in",
        "http://127.0.0.1:9000/in?x=1",
        "http://127.0.0.1:9000/in/deeper",
    ],
)
def test_what_is_listed_is_allowed(url: str) -> None:
    check_allowed(parse(url), settings(*ALLOW).allowed)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://hooks.example.com/", "this path"),
        ("https://hooks.example.com/forq", "this path"),
        ("https://hooks.example.com/forqs/x", "this path"),
        ("http://127.0.0.1:9000/inside", "this path"),
        ("http://hooks.example.com/forq/", "not in webhooks.allow"),
        ("https://hooks.example.com:444/forq/", "not in webhooks.allow"),
        ("https://hooks.example.com.evil.example/forq/", "not in webhooks.allow"),
        ("https://evil.example/https://hooks.example.com/forq/", "not in webhooks.allow"),
        ("https://other.example.com/", "not in webhooks.allow"),
        ("https://hooks.example.com./forq/", "valid host"),
        ("https://hooks.example.com@evil.example/forq/", "user or password"),
        ("https://u:p@hooks.example.com/forq/", "user or password"),
        ("https://hooks.example.com/forq/../admin", ". or .."),
        ("https://hooks.example.com/forq/%2e%2E/admin", ". or .."),
        ("https://hooks.example.com/forq/.%2e%2fadmin", ". or .."),
        ("https://hooks.example.com/forq/..%5cadmin", ". or .."),
        ("https://hooks.example.com\\@evil.example/forq/", "backslashes"),
        ("https://hooks.example.com/forq/ x", "spaces"),
        ("https://hooks.example.com/forq/\r\nHost: evil", "spaces"),
        ("https://hooks.example.com/forq/\u00e4", "plain characters"),
        ("https://h\u00f6oks.example.com/forq/", "plain characters"),
        ("https://hooks.example.com/forq/#x", "fragment"),
        ("https://hooks.example.com:0/forq/", "host and port"),
        ("https://hooks.example.com:99999/forq/", "host and port"),
        ("https://hooks.example.com:/forq/", "host and port"),
        ("https://[::1/forq/", "host and port"),
        ("https:///forq/", "host and port"),
        ("https://a%2eb/forq/", "host and port"),
        ("ftp://hooks.example.com/forq/", "https://"),
        ("file:///etc/passwd", "https://"),
        ("hooks.example.com/forq/", "https://"),
        ("", "plain characters"),
        ("https://hooks.example.com/forq/" + "x" * 2048, "the limit is 2048"),
    ],
)
def test_what_is_not_listed_or_could_be_read_in_two_ways_is_refused(url: str, why: str) -> None:
    with pytest.raises(BadInput) as refusal:
        check_allowed(parse(url), settings(*ALLOW).allowed)
    assert why in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_an_empty_list_allows_nothing_and_says_so() -> None:
    with pytest.raises(BadInput, match=r"no webhook is allowed here.*webhooks\.allow"):
        check_allowed(parse("https://hooks.example.com/"), settings().allowed)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_and_what_is_read_reads_the_same_again(text: str) -> None:
    for url in (text, "https://" + text, "https://a.example/" + text):
        try:
            target = parse(url)
        except BadInput:
            continue
        assert parse(target.url) == target


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("http://hooks.example.com/", "plain http"),
        ("http://10.0.0.1/", "plain http"),
        ("https://hooks.example.com/?a=1", "query"),
        ("https://u@hooks.example.com/", "user"),
        ("hooks.example.com", "https://"),
        ({"url": "https://hooks.example.com/", "private": True}, "private"),
        ({"allow_private": True}, "url"),
    ],
)
def test_an_entry_of_the_list_that_cannot_be_meant_is_refused(entry: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        settings(entry)


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        ("10.0.0.1", False, True),
        ("172.16.3.4", False, True),
        ("192.168.1.1", False, True),
        ("100.64.0.1", False, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("fc00::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("64:ff9b::a00:1", False, True),
        ("2002:a00:1::", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:a9fe:a9fe::", False, False),
        ("64:ff9b:1::a9fe:a9fe", False, False),
        ("64:ff9b:1::a00:1", False, True),
        ("::169.254.169.254", False, False),
        ("::127.0.0.1", False, True),
        ("::ffff:0:127.0.0.1", False, True),
        ("2600::5efe:7f00:1", False, True),
        ("2600::200:5efe:a9fe:a9fe", False, False),
        ("fec0::1", False, True),
        ("168.63.129.16", False, False),
        ("192.0.0.192", False, False),
        ("fe80::1", False, False),
        ("fd00:ec2::254", False, False),
        ("100.100.100.200", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
        ("255.255.255.255", False, True),
    ],
)
def test_an_address_is_refused_by_what_it_leads_to(address: str, public: bool, private: bool) -> None:
    found = ipaddress.ip_address(address)
    assert (refusal_of(found, allow_private=False) is None) == public
    assert (refusal_of(found, allow_private=True) is None) == private
