"""`forq keys`, and what `forq up` and `forq list` make of keys and tenants."""

import json
from pathlib import Path

import pytest
from cli_support import Forq

from db.session import Database
from jobs import keys


def test_a_key_is_made_listed_and_revoked(run: Forq) -> None:
    made = run("keys", "create", "nightly", "--scope", "read", "--scope", "submit", "--tenant", "a", "--expires", "90d")
    key = made.out.strip()
    assert made.exit_code == 0
    assert keys.parse(key) is not None
    assert made.out.count("\n") == 1  # KEY=$(forq keys create ...)
    assert "submit, read, tenant a, until" in made.err
    assert "not shown again" in made.err
    assert key not in made.err
    listed = run("keys", "list")
    assert key[-43:] not in listed.out
    assert listed.out.splitlines()[1].split("\t")[1:5] == ["nightly", "a", "submit read", "live"]
    key_id = listed.out.splitlines()[1].split("\t")[0]
    assert run("keys", "revoke", key_id.lower()).out == f"key {key_id} (nightly) is revoked\n"
    assert json.loads(run("keys", "list", "--json").out)[0]["state"] == "revoked"
    assert json.loads(run("keys", "revoke", key_id, "--json").out)["id"] == key_id


def test_json_has_the_key_once(run: Forq) -> None:
    made = json.loads(run("keys", "create", "k", "--scope", "admin", "--rate", "9", "--json").out)
    assert keys.parse(made.pop("key")) is not None
    assert json.loads(run("keys", "list", "--json").out) == [made]
    assert (made["tenant"], made["scopes"], made["rate_per_minute"], made["expires_at"]) == (
        "default",
        ["admin"],
        9,
        None,
    )


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["k"], "scopes are none"),
        (["k", "--scope", "root"], "root"),
        (["k", "--scope", "read", "--expires", "30m"], "no length of time"),
        (["k", "--scope", "read", "--expires", "-1d"], "more than 0"),
        (["k", "--scope", "read", "--expires", "0h"], "--expires"),
        (["k", "--scope", "read", "--expires", "99999d"], "at most"),
        (["k", "--scope", "read", "--expires", ""], "no length of time"),
        (["k", "--scope", "read", "--tenant", "A b"], "tenant"),
        (["k", "--scope", "read", "--rate", "0"], "rate"),
        (["", "--scope", "read"], "name"),
    ],
)
def test_bad_usage_is_one_line_and_makes_no_key(run: Forq, args: list[str], what: str) -> None:
    done = run("keys", "create", *args)
    assert (done.exit_code, done.out) == (2, "")
    assert what in done.err
    assert len(done.err.splitlines()) == 1
    assert json.loads(run("keys", "list", "--json").out) == []


def test_a_key_that_is_not_there_cannot_be_revoked(run: Forq) -> None:
    done = run("keys", "revoke", "nope")
    assert done.exit_code == 2
    assert "forq keys list" in done.err


def test_up_refuses_an_address_that_others_reach_before_it_starts_anything(
    run: Forq, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORQ_API_HOST", "0.0.0.0")
    done = run("up")
    assert done.exit_code == 2
    assert done.err.splitlines()[-1].startswith("forq: host is '0.0.0.0'")
    assert "forq keys create" in done.err
    assert not (home / "logs").exists()


def test_jobs_can_be_listed_by_tenant(run: Forq, prompts: Path, home: Path) -> None:
    job_id = json.loads(run("submit", str(prompts), "--json").out)["job_id"]
    assert [job["job_id"] for job in json.loads(run("list", "--tenant", "default", "--json").out)] == [job_id]
    assert json.loads(run("list", "--tenant", "a", "--json").out) == []
    database = Database(f"sqlite:///{home / 'forq.db'}")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE jobs SET tenant = 'a'")
    database.dispose()
    for args in (["list"], ["list", "--tenant", "a"]):
        assert [job["job_id"] for job in json.loads(run(*args, "--json").out)] == [job_id]
    assert run("status", job_id).exit_code == 0  # the operator's
