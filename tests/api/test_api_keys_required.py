"""When keys are required, how often one may ask, and the addresses that may be bound."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from api_support import assert_problem, parquet_bytes
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from api import buckets
from api.access import _network_of
from api.app import create_app
from api.buckets import Buckets
from db.session import Database
from jobs import keys
from jobs.api_settings import ApiSettings
from jobs.binding import check_bind, is_loopback, local_url
from jobs.errors import BadInput
from jobs.settings import Settings

BAD = {"Authorization": "Bearer hunter2"}


@contextmanager
def serving(settings: Settings, base_url: str = "http://localhost", **api: Any) -> Iterator[TestClient]:
    app = create_app(settings.model_copy(update={"api": ApiSettings(**api)}))
    with TestClient(app, base_url=base_url) as client:
        yield client


def headers_of(database: Database, *scopes: str, **options: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys.create(database, 'k', scopes or ['read'], **options)[1]}"}


def test_from_the_first_key_on_everyone_needs_one_and_that_stays_so(settings: Settings, database: Database) -> None:
    with serving(settings) as client:
        assert client.get("/v1/jobs").status_code == 200
        assert client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}).status_code == 201
        assert_problem(client.get("/v1/jobs", headers=BAD), 401, "no key")
        described, key = keys.create(database, "k", ["read"])
        assert_problem(client.get("/v1/jobs"), 401)
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        keys.revoke(database, described["id"])
        assert_problem(client.get("/v1/jobs"), 401)  # not open again
    with serving(settings) as client:
        assert_problem(client.get("/v1/jobs"), 401)


def test_a_key_of_the_default_tenant_sees_what_was_submitted_without_one(
    settings: Settings, database: Database
) -> None:
    with serving(settings, require_keys=False) as client:
        job_id = client.post("/v1/jobs", files={"file": ("a.parquet", parquet_bytes())}).json()["job_id"]
        assert client.get(f"/v1/jobs/{job_id}", headers=headers_of(database)).status_code == 200
        assert client.get(f"/v1/jobs/{job_id}", headers=headers_of(database, tenant="b")).status_code == 404


def test_keys_may_be_optional_on_loopback_where_the_settings_say_so(settings: Settings, database: Database) -> None:
    keys.create(database, "k", ["read"])
    with serving(settings, require_keys=False) as client:
        assert client.get("/v1/jobs").status_code == 200
        assert_problem(client.get("/v1/jobs", headers=BAD), 401)


def test_keys_may_be_required_before_there_is_one_and_then_any_name_is_answered(settings: Settings) -> None:
    with serving(settings, "http://forq.example", require_keys=True) as client:
        assert_problem(client.get("/v1/jobs"), 401)
        assert client.get("/healthz").status_code == 200
    with serving(settings, "http://forq.example") as client:
        assert_problem(client.get("/v1/jobs"), 403, "loopback", "api.require_keys")


def test_where_keys_may_be_left_out_the_document_says_so(settings: Settings) -> None:
    with serving(settings) as client:
        document = client.get("/openapi.json").json()
        assert document["paths"]["/v1/jobs"]["get"]["security"] == [{}, {"key": []}]


def test_a_key_that_asks_too_often_waits_and_no_other_does(settings: Settings, database: Database) -> None:
    with serving(settings, rate_per_minute=2, rate_burst=2) as client:
        busy, calm, fast = headers_of(database), headers_of(database), headers_of(database, rate_per_minute=1000)
        assert [client.get("/v1/jobs", headers=busy).status_code for _ in range(3)] == [200, 200, 429]
        response = client.get("/v1/jobs", headers=busy)
        assert_problem(response, 429, "try again in")
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert client.get("/v1/jobs", headers=calm).status_code == 200
        assert client.get("/v1/jobs", headers=fast).status_code == 200
        assert client.get("/healthz").status_code == 200


def test_after_too_many_bad_keys_an_address_gets_no_more_tries(settings: Settings, database: Database) -> None:
    with serving(settings, failures_per_minute=3) as client:
        good = headers_of(database)
        assert client.get("/v1/jobs", headers=good).status_code == 200
        assert [client.get("/v1/jobs", headers=BAD).status_code for _ in range(4)] == [401, 401, 401, 429]
        response = client.get("/v1/jobs", headers=good)  # or else the limit would not hold a guess that is right
        assert_problem(response, 429, "this address")
        assert int(response.headers["retry-after"]) >= 1
        assert_problem(client.get("/v1/jobs"), 401)  # no key is no try


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 20)), max_size=60), st.integers(1, 120), st.integers(1, 9)
)
def test_a_bucket_never_gives_more_than_its_burst_and_what_flowed_in(
    steps: list[tuple[str, float]], per_minute: int, burst: int
) -> None:
    clock = Clock()
    bucket = Buckets(per_minute, burst, clock)
    given_out = {"a": 0, "b": 0}
    for name, pause_s in steps:
        clock.now_s += pause_s
        wait_s = bucket.wait_s(name)
        if wait_s == 0:
            bucket.take(name)
            given_out[name] += 1
        else:
            clock.now_s += wait_s + 1e-6  # what it says is enough
            assert bucket.wait_s(name) == 0
        passed_s = clock.now_s - 1000.0
        assert given_out[name] <= burst + passed_s * per_minute / 60 + 1e-6


def test_buckets_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_BUCKETS", 3)
    bucket = Buckets(60, 1, Clock())
    for name in "abcde":
        bucket.take(name)
    assert [bucket.wait_s(name) > 0 for name in "abcde"] == [False, False, True, True, True]


def test_no_limit_is_no_limit() -> None:
    bucket = Buckets(0, 1, Clock())
    for _ in range(100):
        bucket.take("a")
    assert bucket.wait_s("a") == 0


def test_an_address_of_version_6_counts_with_its_network() -> None:
    assert _network_of("2001:db8::1") == _network_of("2001:db8::ffff:1") != _network_of("2001:db8:0:1::1")
    assert _network_of("::ffff:192.0.2.1") == _network_of("192.0.2.1") != _network_of("192.0.2.2")
    assert _network_of("testclient") == "testclient"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_an_address_that_others_reach_needs_a_live_key(settings: Settings, database: Database, host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(BadInput, match="forq keys create") as refusal:
        check_bind(settings, database, host)
    assert repr(host) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    described, _ = keys.create(database, "k", ["read"])
    check_bind(settings, database, host)
    without = settings.model_copy(update={"api": ApiSettings(require_keys=False)})
    with pytest.raises(BadInput, match=r"api\.require_keys is false"):
        check_bind(without, database, host)
    keys.revoke(database, described["id"])
    with pytest.raises(BadInput, match="no live API key"):
        check_bind(settings, database, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_none(settings: Settings, database: Database, host: str) -> None:
    check_bind(settings, database, host)


@pytest.mark.parametrize(
    ("host", "certificate", "url"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:8765"),
        ("::1", None, "http://[::1]:8765"),
        ("0.0.0.0", "c.pem", "https://127.0.0.1:8765"),
        ("::", None, "http://[::1]:8765"),
        ("forq.example", "c.pem", "https://forq.example:8765"),
    ],
)
def test_the_url_of_this_machine(settings: Settings, host: str, certificate: str | None, url: str) -> None:
    api = ApiSettings.model_validate({"ssl_certfile": certificate})
    assert local_url(settings.model_copy(update={"api_host": host, "api": api})) == url


@pytest.mark.parametrize(
    "values",
    [
        {"ssl_keyfile": "k.pem"},
        {"trusted_proxies": ["*"]},
        {"trusted_proxies": ["10.0.0.1/8"]},
        {"require_keys": "sometimes"},
        {"rate_per_minute": -1},
        {"ssl_cert_file": "c.pem"},
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        ApiSettings.model_validate(values)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_a_variable_says_whether_keys_are_required(monkeypatch: pytest.MonkeyPatch, text: str, value: Any) -> None:
    monkeypatch.setenv("FORQ_API__REQUIRE_KEYS", text)
    monkeypatch.setenv("FORQ_API__TRUSTED_PROXIES", '["10.0.0.0/24"]')
    monkeypatch.setenv("FORQ_API__SSL_CERTFILE", "c.pem")
    monkeypatch.setenv("FORQ_API__SSL_KEYFILE_PASSWORD", "hunter2")
    settings = Settings()
    assert settings.api.require_keys == value
    assert settings.api.trusted_proxies == ("10.0.0.0/24",)
    assert "hunter2" not in repr(settings)
