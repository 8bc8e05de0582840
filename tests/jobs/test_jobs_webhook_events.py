"""Every change of a job's state queues its event once, in its own transaction; and whose webhooks hear of it."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from batches import MODEL, acquire, answered, drain, failed, job_state, run_shard, submit_rows, submit_table
from receiver import allowing, events_of, rows
from sqlalchemy import delete, update

from db.models import Job
from db.session import Database
from db.states import JobState
from jobs import ending, leases, results
from jobs.errors import BadInput, Conflict, NotFound
from jobs.settings import Settings
from jobs.upkeep.purge import purge
from jobs.webhooks import cli, events, registry
from jobs.webhooks.deliveries import list_deliveries
from jobs.webhooks.events import Event
from jobs.webhooks.registry import MAX_PER_TENANT

URL = "https://hooks.example.com/forq"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return allowing(settings, "https://hooks.example.com/")


@pytest.fixture
def webhook_id(database: Database, settings: Settings) -> str:
    return str(registry.add(database, settings, URL)[0]["id"])


def release_and_sweep(database: Database, job_id: str) -> None:
    """A worker dies after it has ended the last shard and before it could say so."""
    lease = acquire(database)
    results.write(database, lease, [answered(row) for row in results.load(database, lease).rows])
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE shards SET state = 'done', lease_owner = NULL, lease_expires_at = NULL")
    leases.sweep(database)


def before_running_was_said(database: Database, job_id: str) -> None:
    """A worker dies between the lease and the job's state; the sweep says both."""
    acquire(database)
    with database.write() as connection:
        connection.execute(update(Job).values(state=JobState.QUEUED, started_at=None))
        connection.exec_driver_sql("DELETE FROM webhook_deliveries")
        connection.exec_driver_sql(
            "UPDATE shards SET state = 'done', num_completed = 3, lease_owner = NULL, lease_expires_at = NULL"
        )
    leases.sweep(database)


def cancelled_while_running(database: Database, job_id: str) -> None:
    lease = acquire(database)
    assert ending.cancel(database, job_id) == "cancelling"
    leases.abandon(database, lease)


def cancelled_and_swept(database: Database, job_id: str) -> None:
    lease = acquire(database)
    ending.cancel(database, job_id)
    leases.release_all(database, lease.owner, crashed=True)
    leases.sweep(database)


def finished_while_cancelling(database: Database, job_id: str) -> None:
    lease = acquire(database)
    ending.cancel(database, job_id)
    run_shard(database, lease)


def retried(database: Database, job_id: str) -> None:
    drain(database, failed)
    ending.retry(database, job_id)
    drain(database)


WAYS: dict[str, tuple[Any, list[str]]] = {
    "answered": (lambda database, job_id: drain(database), ["running", "completed"]),
    "all rows failed": (lambda database, job_id: drain(database, failed), ["running", "completed"]),
    "the worker died behind the last shard": (release_and_sweep, ["running", "completed"]),
    "the worker died before it said running": (before_running_was_said, ["running", "completed"]),
    "cancelled while queued": (ending.cancel, ["cancelled"]),
    "cancelled while running": (cancelled_while_running, ["running", "cancelled"]),
    "cancelled, and its worker died": (cancelled_and_swept, ["running", "cancelled"]),
    "cancelled, and its last shard finished": (finished_while_cancelling, ["running", "cancelled"]),
    "failed while queued": (lambda database, job_id: ending.fail_job(database, job_id, "no model"), ["failed"]),
    "failed while running": (
        lambda database, job_id: (acquire(database), ending.fail_job(database, job_id, "no model")),
        ["running", "failed"],
    ),
    "retried": (retried, ["running", "completed", "running", "completed"]),
}


@pytest.mark.parametrize(("act", "said"), WAYS.values(), ids=WAYS)
def test_every_way_a_job_goes_queues_each_of_its_events_once(
    database: Database, settings: Settings, webhook_id: str, act: Any, said: list[str]
) -> None:
    job_id = submit_rows(database, settings, 3)
    act(database, job_id)
    for again in (leases.sweep, lambda database: ending.settle_job(database, job_id)):
        again(database)
    assert events_of(database) == [(f"job.{state}", job_id) for state in said]
    assert job_state(database, job_id) == said[-1]
    ids = [row[0] for row in rows(database, "SELECT event_id FROM webhook_deliveries")]
    assert len(set(ids)) == len(ids)


def test_what_is_rolled_back_is_not_announced(database: Database, settings: Settings, webhook_id: str) -> None:
    job_id = submit_rows(database, settings, 3)

    def begin_and_fail() -> None:
        with database.write() as connection:
            connection.execute(update(Job).where(Job.id == job_id).values(state=JobState.RUNNING))
            events.announce(connection, job_id, JobState.RUNNING)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        begin_and_fail()
    assert events_of(database) == []
    assert job_state(database, job_id) == "queued"


def test_what_does_not_change_a_state_is_no_event(database: Database, settings: Settings, webhook_id: str) -> None:
    job_id = submit_rows(database, settings, 9)
    assert events_of(database) == []
    first, second = acquire(database), acquire(database)
    leases.release(database, first)
    run_shard(database, second)
    assert events_of(database) == [("job.running", job_id)]
    ending.fail_job(database, job_id, "no model")
    ending.fail_job(database, job_id, "again")
    with pytest.raises(Conflict):
        ending.cancel(database, job_id)
    assert events_of(database) == [("job.running", job_id), ("job.failed", job_id)]


def test_a_payload_has_names_counts_and_times_and_nothing_of_prompts_answers_or_errors(
    database: Database, settings: Settings, webhook_id: str
) -> None:
    job_id = submit_table(database, settings, {"prompt": ["a secret question", None]}, name="mine").job_id
    drain(database, lambda row: failed(row, error="the secret question was refused"))
    running, completed = [json.loads(row[0]) for row in rows(database, "SELECT payload FROM webhook_deliveries")]
    assert running["type"] == "job.running"
    assert running["data"]["counts"] == {"total": 2, "completed": 0, "failed": 1, "cancelled": 0}
    assert (running["data"]["state"], running["data"]["finished_at"]) == ("running", None)
    assert completed == {
        "type": "job.completed",
        "timestamp": completed["timestamp"],
        "data": {
            "job_id": job_id,
            "name": "mine",
            "state": "completed",
            "model": MODEL,
            "counts": {"total": 2, "completed": 0, "failed": 2, "cancelled": 0},
            "created_at": running["data"]["created_at"],
            "started_at": running["data"]["started_at"],
            "finished_at": completed["data"]["finished_at"],
        },
    }
    assert completed["timestamp"].endswith("Z")
    assert completed["data"]["started_at"] <= completed["data"]["finished_at"] <= completed["timestamp"]
    assert "secret" not in str(rows(database, "SELECT payload FROM webhook_deliveries"))


def test_only_the_tenants_live_webhooks_that_asked_for_an_event_hear_of_it(
    database: Database, settings: Settings
) -> None:
    def add(path: str, events: Any = tuple(Event), **options: Any) -> str:
        return str(registry.add(database, settings, f"https://hooks.example.com/{path}", events, **options)[0]["id"])

    all_of_a, ends_of_a = add("1", tenant="a"), add("2", ["job.completed"], tenant="a")
    removed, named_only = add("3", tenant="a"), add("4", tenant="a", every_job=False)
    add("5", tenant="b")
    registry.remove(database, removed)
    submit_rows(database, settings, 1, tenant="a")
    drain(database)
    found = rows(database, "SELECT webhook_id, type FROM webhook_deliveries")
    assert sorted(found) == sorted(
        [(all_of_a, "job.running"), (all_of_a, "job.completed"), (ends_of_a, "job.completed")]
    )
    # One event, one id, whoever hears of it.
    assert len(rows(database, "SELECT DISTINCT event_id FROM webhook_deliveries WHERE type = 'job.completed'")) == 1
    named = submit_rows(database, settings, 1, tenant="a", webhook="https://hooks.example.com/4")
    drain(database)
    heard = rows(database, f"SELECT type, job_id FROM webhook_deliveries WHERE webhook_id = '{named_only}' ORDER BY id")
    assert heard == [("job.running", named), ("job.completed", named)]


@pytest.mark.parametrize("url", ["https://hooks.example.com/5", "https://hooks.example.com/none", "x y"])
def test_a_job_can_name_only_a_webhook_that_its_tenant_has(database: Database, settings: Settings, url: str) -> None:
    registry.add(database, settings, "https://hooks.example.com/5", tenant="b")
    with pytest.raises(BadInput, match="webhook"):
        submit_rows(database, settings, 1, webhook=url)
    assert rows(database, "SELECT id FROM jobs") == []


def test_a_webhook_that_is_removed_while_a_job_ends_does_not_stop_it(
    database: Database, settings: Settings, webhook_id: str
) -> None:
    """The webhook was seen, then removed by another, then written down: its row must still be there."""
    job_id = submit_rows(database, settings, 1)
    if database.is_sqlite:
        pytest.skip("SQLite's writers exclude each other")
    with database.write() as connection:
        events.announce(connection, job_id, JobState.CANCELLED)
        registry.remove(database, webhook_id)  # waits for nothing
    assert registry.list_webhooks(database) == []
    assert list_deliveries(database) == []
    assert ending.cancel(database, job_id) == "cancelled"


def test_events_go_with_their_job_and_old_ones_by_a_purge(
    database: Database, settings: Settings, webhook_id: str
) -> None:
    job_id = submit_rows(database, settings, 1)
    drain(database)
    with database.write() as connection:
        connection.exec_driver_sql(
            "UPDATE webhook_deliveries SET state = 'delivered', created_at = '2001-01-01 00:00:00.000000' "
            "WHERE type = 'job.running'"
        )
    assert purge(database, settings, 3600.0, dry_run=True).webhook_events == 1
    assert purge(database, settings, 3600.0).webhook_events == 1
    assert events_of(database) == [("job.completed", job_id)]  # still to be sent, however old it gets
    with database.write() as connection:
        connection.execute(delete(Job))
    assert events_of(database) == []
    registry.remove(database, webhook_id)
    purge(database, settings, 3600.0)
    assert rows(database, "SELECT state, secret FROM webhooks") == [("removed", "")]
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE webhooks SET removed_at = '2001-01-01 00:00:00.000000'")
    purge(database, settings, 3600.0)
    assert rows(database, "SELECT id FROM webhooks") == []


def test_webhooks_are_added_listed_rotated_and_removed_and_the_secret_is_in_no_list(
    database: Database, settings: Settings
) -> None:
    described, secret = registry.add(database, settings, "https://HOOKS.example.com:443/forq", ["job.failed"])
    assert secret.startswith("whsec_")
    assert (described["url"], described["events"], described["state"]) == (URL, ["job.failed"], "active")
    assert registry.list_webhooks(database) == registry.list_webhooks(database, "default") == [described]
    assert registry.list_webhooks(database, "other") == []
    again, newer = registry.rotate(database, described["id"])
    until = again.pop("old_secret_until")
    assert until is not None
    assert ({**again, "old_secret_until": None}, newer != secret) == (described, True)
    assert registry.signing_keys(database, described["id"]).secrets == (newer, secret)
    with pytest.raises(Conflict, match=f"has two secrets already, until {until}: rotate it then, or at once"):
        registry.rotate(database, described["id"])
    assert registry.signing_keys(database, described["id"]).secrets == (newer, secret), "the receiver's still signs"
    newest = registry.rotate(database, described["id"], overlap_s=0)[1]
    assert registry.signing_keys(database, described["id"]).secrets == (newest,)
    assert not any(text in str(registry.list_webhooks(database)) for text in (secret, newer, newest))
    registry.remove(database, described["id"])
    assert registry.list_webhooks(database) == []
    for act in (registry.get, registry.remove, registry.rotate, registry.queue_ping, registry.signing_keys):
        with pytest.raises(NotFound, match="no webhook"):
            act(database, described["id"])


def test_an_old_secret_signs_until_its_time_is_over(database: Database, settings: Settings, webhook_id: str) -> None:
    newer = registry.rotate(database, webhook_id)[1]
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE webhooks SET old_secret_until = '2001-01-01 00:00:00.000000'")
    assert registry.signing_keys(database, webhook_id).secrets == (newer,)
    assert registry.get(database, webhook_id)["old_secret_until"] is None
    newest = registry.rotate(database, webhook_id)[1]
    assert registry.signing_keys(database, webhook_id).secrets == (newest, newer)


def test_of_many_that_are_added_at_once_each_is_there_once_and_none_over_the_limit(
    database: Database, settings: Settings
) -> None:
    """Two of each address at a time: every second one must be refused, and those over the limit."""
    urls = [f"https://hooks.example.com/forq/{number // 2}" for number in range(2 * MAX_PER_TENANT + 8)]

    def add(url: str) -> str | None:
        with contextlib.suppress(Conflict):
            return str(registry.add(database, settings, url)[0]["url"])
        return None

    with ThreadPoolExecutor(8) as pool:
        made = [url for url in pool.map(add, urls) if url is not None]
    there = [webhook["url"] for webhook in registry.list_webhooks(database)]
    assert sorted(there) == sorted(made) == sorted(set(there))
    assert len(there) == MAX_PER_TENANT


def test_another_tenants_webhook_reads_like_none(database: Database, settings: Settings, webhook_id: str) -> None:
    for act in (registry.get, registry.remove, registry.rotate, registry.queue_ping):
        with pytest.raises(NotFound) as theirs:
            act(database, webhook_id, "other")
        with pytest.raises(NotFound) as nobodys:
            act(database, "0" * 26, "other")
        assert str(theirs.value).replace(webhook_id, "ID") == str(nobodys.value).replace("0" * 26, "ID")
    assert registry.get(database, webhook_id, "default")["state"] == "active"


def test_what_cannot_be_a_webhook_is_refused_and_nothing_is_stored(database: Database, settings: Settings) -> None:
    for url, said, options, error, why in (
        ("https://evil.example/", ["job.failed"], {}, BadInput, "not in webhooks.allow"),
        (URL, [], {}, BadInput, "none"),
        (URL, ["job.queued"], {}, BadInput, "job.queued"),
        (URL, ["job.failed"], {"tenant": "A b"}, BadInput, "tenant"),
    ):
        with pytest.raises(error, match=why):
            registry.add(database, settings, url, said, **options)
    assert rows(database, "SELECT id FROM webhooks") == []
    registry.add(database, settings, URL)
    with pytest.raises(Conflict, match="already"):
        registry.add(database, settings, URL)
    registry.add(database, settings, URL, tenant="other")
    for number in range(registry.MAX_PER_TENANT - 1):
        registry.add(database, settings, f"{URL}/{number}")
    with pytest.raises(Conflict, match="the limit is 20"):
        registry.add(database, settings, f"{URL}/more")


def test_the_command_lines_names_are_those_of_the_code() -> None:
    from db.states import DeliveryState

    assert list(Event) == list(cli.EVENTS)
    assert list(DeliveryState) == list(cli.STATES)
