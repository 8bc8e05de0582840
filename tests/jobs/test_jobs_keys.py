"""Keys and tenants in the database, on both."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from batches import submit_table
from sqlalchemy import insert, select, update

from db.clock import db_now
from db.models import ApiKey, Job
from db.session import Database
from jobs import keys, keys_cli, service, tenants
from jobs.errors import BadInput, NotFound
from jobs.keys import KeyRefusedError, Presented, Scope
from jobs.settings import Settings


def presented(key: str) -> Presented:
    found = keys.parse(key)
    assert found is not None
    return found


def test_a_key_is_shown_once_and_stored_as_the_hash_of_its_secret(database: Database) -> None:
    described, key = keys.create(database, "nightly", ["read", "submit"], tenant="a", expires_s=60.0, rate_per_minute=7)
    prefix, key_id, secret = key.split("_", 2)
    assert (prefix, key_id, len(secret)) == ("forq", described["id"], 43)  # 256 bits
    with database.read() as connection:
        row = connection.execute(select(ApiKey.__table__)).one()
    assert row.secret_sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in repr(row) + repr(described) + repr(presented(key)) + repr(keys.list_keys(database))
    assert row.secret_sha256 not in repr(presented(key)) + repr(keys.list_keys(database))
    assert (row.expires_at - row.created_at).total_seconds() == pytest.approx(60, abs=1)
    assert described["scopes"] == ["submit", "read"]
    found = keys.verify(database, presented(key))
    assert (found.id, found.tenant, found.rate_per_minute, found.use_is_old) == (key_id, "a", 7, True)
    assert [found.may(scope) for scope in Scope] == [True, True, False]


def test_no_two_keys_are_alike(database: Database) -> None:
    made = [keys.create(database, "same", ["read"])[1] for _ in range(20)]
    assert len({key[-43:] for key in made}) == len({presented(key).id for key in made}) == 20


def test_an_admin_may_everything(database: Database) -> None:
    found = keys.verify(database, presented(keys.create(database, "k", ["admin"])[1]))
    assert all(found.may(scope) for scope in Scope)


@pytest.mark.parametrize(
    "text",
    ["", "forq_", "x", "forq__", "forq_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z_", "forq_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z_" + "A" * 44,
     "forq_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z_" + "A" * 42 + "\n", "forq_" + "٣" * 26 + "_" + "A" * 43,
     "FORQ_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z_" + "A" * 43, "forq_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z_" + "A" * 43 + "\0"],
)  # fmt: skip
def test_what_is_no_key_is_not_looked_up(text: str) -> None:
    assert keys.parse(text) is None


def test_a_wrong_secret_and_an_unknown_id_cost_the_same_and_read_the_same(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(
        keys.hmac, "compare_digest", lambda a, b: (compared.append((len(a), len(b))), compare(a, b))[1]
    )  # fmt: skip
    described, _ = keys.create(database, "k", ["read"])
    refusals = []
    for key_id in (described["id"], "01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"):
        with pytest.raises(KeyRefusedError) as refusal:
            keys.verify(database, presented(f"forq_{key_id}_{'A' * 43}"))
        refusals.append(str(refusal.value))
    assert compared == [(64, 64)] * 2
    assert refusals[0] == refusals[1]


def test_the_stand_in_for_a_missing_row_opens_nothing(database: Database) -> None:
    with pytest.raises(KeyRefusedError):
        keys.verify(database, Presented("01JZ8Y3M5N7Q9R1S2T4V6W8X0Z", hashlib.sha256(b"").hexdigest()))


def test_a_revoked_or_expired_key_is_refused_and_stays_listed(database: Database) -> None:
    (first, revoked), (second, expired) = (keys.create(database, name, ["read"], expires_s=60) for name in "ab")
    described = keys.revoke(database, first["id"])
    assert keys.revoke(database, first["id"]) == described  # the first time stays
    with database.write() as connection:
        connection.execute(update(ApiKey).where(ApiKey.id == second["id"]).values(expires_at=db_now(-1.0)))
    for key, why in ((revoked, "revoked"), (expired, "expired")):
        with pytest.raises(KeyRefusedError, match=why) as refusal:
            keys.verify(database, presented(key))
        assert key[-43:] not in str(refusal.value)
    assert [key["state"] for key in keys.list_keys(database)] == ["revoked", "expired"]
    assert (keys.any_key(database), keys.any_live_key(database)) == (True, False)
    keys.create(database, "c", ["read"])
    assert keys.any_live_key(database)


def test_without_keys_there_are_none(database: Database) -> None:
    assert (keys.any_key(database), keys.any_live_key(database), keys.list_keys(database)) == (False, False, [])


@pytest.mark.parametrize("key_id", ["01JZ8Y3M5N7Q9R1S2T4V6W8X0Z", "", "\0", "x" * 5000])
def test_a_key_that_is_not_there_cannot_be_revoked(database: Database, key_id: str) -> None:
    with pytest.raises(NotFound, match="forq keys list"):
        keys.revoke(database, key_id)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"scopes": []}, "none"),
        ({"scopes": ["read", "root"]}, "root"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "A"}, "tenant"),
        ({"tenant": "a" * 64}, "tenant"),
        ({"tenant": "a\n"}, "tenant"),
        ({"rate_per_minute": 0}, "rate"),
        ({"rate_per_minute": 1 << 40}, "rate"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(database: Database, values: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        keys.create(database, **{"name": "k", "scopes": ["read"], **values})
    assert not keys.any_key(database)


def test_of_many_at_once_one_writes_the_last_use(database: Database) -> None:
    described, key = keys.create(database, "k", ["read"])
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: keys.note_use(database, described["id"]), range(16))) == 1
    assert not keys.verify(database, presented(key)).use_is_old
    assert not keys.note_use(database, described["id"])


def test_a_key_is_good_until_its_moment_on_the_databases_clock(database: Database) -> None:
    _, key = keys.create(database, "k", ["read"], expires_s=0.3)
    deadline = time.monotonic() + 30

    def use_it_up() -> None:
        while time.monotonic() < deadline:
            keys.verify(database, presented(key))

    with pytest.raises(KeyRefusedError, match="expired"):
        use_it_up()


def test_the_same_content_is_one_job_per_tenant(database: Database, settings: Settings) -> None:
    columns = {"prompt": ["one", "two"]}
    first = {tenant: submit_table(database, settings, columns, dedupe=True, tenant=tenant) for tenant in "ab"}
    again = {tenant: submit_table(database, settings, columns, dedupe=True, tenant=tenant) for tenant in "ab"}
    assert all(submitted.is_new for submitted in first.values())
    assert not any(submitted.is_new for submitted in again.values())
    assert first["a"].job_id != first["b"].job_id
    for tenant in "ab":
        assert again[tenant].job_id == first[tenant].job_id


def test_the_operator_sees_every_tenants_jobs_and_a_tenant_its_own(database: Database, settings: Settings) -> None:
    mine, operators = (submit_table(database, settings, {"prompt": ["x"]}, **options).job_id
                       for options in ({"tenant": "a"}, {}))  # fmt: skip
    assert [job["job_id"] for job in service.list_jobs(database)] == [operators, mine]
    for tenant, job_id, other in (("a", mine, operators), ("default", operators, mine)):
        assert [job["job_id"] for job in service.list_jobs(database, tenant=tenant)] == [job_id]
        tenants.check_job(database, job_id, tenant)
        with pytest.raises(NotFound) as refusal:
            tenants.check_job(database, other, tenant)
        assert str(refusal.value) == str(service.no_job(other))


def test_a_job_without_a_tenant_is_the_default_ones(database: Database) -> None:
    with database.write() as connection:
        connection.execute(insert(Job).values(
            id="J", state="completed", model="m", decoding="ar", sampling={}, mapping={}, source="cli", data_key="k",
            priority=0, num_rows=1, created_at=db_now(),
        ))  # fmt: skip
    tenants.check_job(database, "J", "default")


def test_the_command_line_knows_every_scope() -> None:
    assert list(keys_cli.SCOPES) == list(Scope)
