"""Deliveries to a real HTTP server: signed, retried, ordered per job, and one dead receiver holds up nobody."""

import asyncio
import contextlib
import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
from batches import drain, submit_rows
from receiver import allowing, make_due, receiving, rows
from standardwebhooks import WebhookVerificationError
from webhook_steps import only, ping, send, verified

from db.session import Database
from jobs import ending
from jobs.settings import Settings
from jobs.webhooks import deliveries, registry
from jobs.webhooks.deliveries import Outcome, delay_s, pause_s
from jobs.webhooks.pinging import send_ping
from jobs.webhooks.sender import Sender


def test_a_jobs_events_arrive_signed_and_in_order(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        _, secret = registry.add(database, settings, receiver.url + "?token=t")
        job_id = submit_rows(database, settings, 3, name="mine")
        drain(database)
        assert send(database, settings, 3) == [1, 1, 0]  # the second one waits for the first
        said = [verified(receiver, secret, number) for number in (0, 1)]
    assert [event["type"] for event in said] == ["job.running", "job.completed"]
    assert [event["data"]["job_id"] for event in said] == [job_id, job_id]
    assert receiver.got[0].path == "/hook?token=t"
    assert receiver.got[0].headers["Host"] == f"127.0.0.1:{receiver.port}"
    assert receiver.got[0].headers["Content-Type"] == "application/json"
    found = deliveries.list_deliveries(database)
    assert {(row["state"], row["attempts"], row["last_status"], row["last_error"]) for row in found} == {
        ("delivered", 1, 200, None)
    }
    assert all(row["delivered_at"] and row["next_attempt_at"] is None for row in found)
    other = registry.new_secret()
    with pytest.raises(WebhookVerificationError):
        verified(receiver, other)
    receiver.got[0].body += b" "
    with pytest.raises(WebhookVerificationError):
        verified(receiver, secret, 0)


def test_what_fails_is_sent_again_later_with_the_same_id(database: Database, settings: Settings) -> None:
    with receiving(lambda number: 500 if number == 0 else 204) as receiver:
        settings = allowing(settings, receiver.url)
        _, secret = ping(database, settings, receiver.url)
        assert send(database, settings, 2) == [1, 0]  # not at once
        failed = only(database)
        assert (failed["state"], failed["attempts"], failed["last_status"]) == ("pending", 1, 500)
        assert failed["last_error"] == "answered 500"
        make_due(database)
        assert send(database, settings) == [1]
        assert verified(receiver, secret)["type"] == "ping"
    assert only(database)["state"] == "delivered"
    assert receiver.got[0].headers["webhook-id"] == receiver.got[1].headers["webhook-id"] == failed["event_id"]
    assert receiver.got[0].body == receiver.got[1].body


def test_after_the_last_attempt_an_event_is_given_up(database: Database, settings: Settings) -> None:
    with receiving(lambda number: 503) as receiver:
        settings = allowing(settings, receiver.url, max_attempts=3)
        ping(database, settings, receiver.url)
        for _ in range(5):
            send(database, settings)
            make_due(database)
    assert len(receiver.got) == 3
    assert (only(database)["state"], only(database)["attempts"]) == ("failed", 3)


def test_the_delays_grow_to_hours_and_ten_attempts_take_about_a_day() -> None:
    delays = [delay_s(attempt, 0.0) for attempt in range(1, 10)]
    assert delays[:4] == [5, 30, 120, 600]
    assert delays == sorted(delays)
    assert 20 * 3600 < sum(delays) < 26 * 3600
    assert delay_s(1, 1.0) == 6
    assert delay_s(99, 0.0) == delays[-1]
    assert delay_s(1, 0.0, 60.0) == 60.0, "as asked for"
    assert delay_s(2, 0.0, 1.0) == 30.0, "but never sooner"
    assert delay_s(1, 0.0, 1e9) == delays[-1], "nor later than the longest"
    assert [pause_s(number) for number in (5, 6, 7, 9, 50)] == [60, 120, 240, 900, 900]


def test_a_redirect_is_not_followed(database: Database, settings: Settings) -> None:
    with receiving() as elsewhere, receiving(lambda number: (302, {"Location": elsewhere.url})) as receiver:
        settings = allowing(settings, receiver.url, elsewhere.url)
        ping(database, settings, receiver.url)
        send(database, settings)
    assert elsewhere.got == []
    assert (only(database)["last_status"], only(database)["state"]) == (302, "pending")
    assert "redirects are not followed" in only(database)["last_error"]


def test_a_receiver_that_is_gone_is_sent_nothing_more(database: Database, settings: Settings) -> None:
    with receiving(lambda number: 410) as receiver:
        settings = allowing(settings, receiver.url)
        webhook_id, _ = ping(database, settings, receiver.url)
        submit_rows(database, settings, 1)
        drain(database)
        send(database, settings)
        make_due(database)
        before = len(receiver.got)
        submit_rows(database, settings, 1)
        drain(database)
        assert send(database, settings) == [0]
    assert len(receiver.got) == before <= 2
    assert registry.get(database, webhook_id)["state"] == "gone"
    found = deliveries.list_deliveries(database)
    assert {(row["state"], row["last_error"]) for row in found} == {("failed", "its receiver is gone (410)")}
    assert len(found) == 3  # the second job queued nothing


def test_a_silent_receiver_is_left_after_the_time_limit(database: Database, settings: Settings) -> None:
    never = threading.Event()
    with receiving(lambda number: never) as receiver:
        settings = allowing(settings, receiver.url, timeout_s=0.2)
        ping(database, settings, receiver.url)
        assert send(database, settings) == [1]
        never.set()
    assert only(database)["last_error"] == (
        f"http://127.0.0.1:{receiver.port} did not answer within 0.2 s (webhooks.timeout_s)"
    )


def test_nobody_there_is_an_ordinary_failure(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        url = receiver.url
    settings = allowing(settings, url)
    ping(database, settings, url)
    send(database, settings)
    assert "cannot be connected to (" in only(database)["last_error"]
    assert (only(database)["state"], only(database)["last_status"]) == ("pending", None)


def test_a_dead_receiver_does_not_hold_up_a_live_one(database: Database, settings: Settings) -> None:
    release = threading.Event()
    with receiving(lambda number: release) as dead, receiving() as live:
        settings = allowing(settings, dead.url, live.url, concurrency=4, timeout_s=60, poll_s=0.02)
        dead_id = registry.add(database, settings, dead.url)[0]["id"]
        for _ in range(6):
            registry.queue_ping(database, dead_id)
        live_id = registry.add(database, settings, live.url)[0]["id"]

        async def run() -> None:
            stop = asyncio.Event()
            running = asyncio.create_task(Sender(database, settings).run(stop))
            for _ in range(2):  # as many as one webhook may have
                await asyncio.to_thread(dead.wait)
            for _ in range(8):
                await asyncio.to_thread(registry.queue_ping, database, live_id)
            for _ in range(8):
                await asyncio.to_thread(live.wait)
            release.set()
            for _ in range(4):
                await asyncio.to_thread(dead.wait)
            stop.set()
            await running

        asyncio.run(run())
        assert len(live.got) == 8
    states = rows(database, f"SELECT state FROM webhook_deliveries WHERE webhook_id = '{live_id}'")
    assert states == [("delivered",)] * 8


def test_a_webhook_that_fails_again_and_again_is_tried_seldom_until_it_answers(
    database: Database, settings: Settings
) -> None:
    status = 500
    with receiving(lambda number: status) as receiver:
        settings = allowing(settings, receiver.url)
        webhook_id, _ = ping(database, settings, receiver.url)
        for _ in range(7):
            registry.queue_ping(database, webhook_id)
        assert send(database, settings, 4) == [2, 2, 2, 0]
        failing = registry.get(database, webhook_id)
        assert (failing["state"], failing["num_failures"], failing["num_pending"]) == ("failing", 6, 8)
        assert failing["resume_at"] is not None
        make_due(database)
        assert send(database, settings, 2) == [1, 0]  # one, and then a pause
        make_due(database)
        with database.write() as connection:  # what waits out a long delay
            connection.exec_driver_sql(
                "UPDATE webhook_deliveries SET next_attempt_at = '2999-01-01 00:00:00.000000' "
                "WHERE id > (SELECT min(id) FROM webhook_deliveries)"
            )
        status = 200
        assert send(database, settings, 5) == [1, 2, 2, 2, 1]
    back = registry.get(database, webhook_id)
    assert (back["state"], back["num_failures"], back["resume_at"], back["num_pending"]) == ("active", 0, None, 0)


def test_failing_webhooks_have_at_most_half_of_the_places(database: Database, settings: Settings) -> None:
    with contextlib.ExitStack() as stack:
        receivers = [stack.enter_context(receiving(lambda number: 500)) for _ in range(4)]
        settings = allowing(settings, *(receiver.url for receiver in receivers), concurrency=4)
        for receiver in receivers:
            ping(database, settings, receiver.url)
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE webhooks SET state = 'failing', num_failures = 9")
        assert send(database, settings, 3) == [2, 2, 0]


def test_a_killed_senders_events_are_sent_by_another_when_its_claim_is_over(
    database: Database, settings: Settings
) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        ping(database, settings, receiver.url)
        (due,) = deliveries.find_due(database, 10)
        claim = deliveries.claim(database, due, 60.0)
        assert claim is not None
        assert deliveries.claim(database, due, 60.0) is None  # one statement decides
        assert send(database, settings) == [0]
        make_due(database)
        assert send(database, settings) == [1]
        # The first one was only stopped: that it failed says nothing any more.
        deliveries.record(database, claim, Outcome(500, "answered 500"), max_attempts=1, delay_s=1, lease_s=30)
    assert (only(database)["state"], only(database)["attempts"], only(database)["last_status"]) == ("delivered", 2, 200)


def test_a_late_failure_does_not_end_anothers_attempt_but_a_late_success_does(
    database: Database, settings: Settings
) -> None:
    settings = allowing(settings, "http://127.0.0.1:9/")
    ping(database, settings, "http://127.0.0.1:9/")
    claims = []
    for _ in range(2):
        (due,) = deliveries.find_due(database, 10)
        claims.append(deliveries.claim(database, due, 60.0))
        make_due(database)
    first, second = claims
    assert first is not None
    assert second is not None
    fate = {"max_attempts": 1, "delay_s": 1.0, "lease_s": 30.0}
    deliveries.record(database, first, Outcome(None, "late"), **fate)
    assert only(database)["state"] == "pending"
    deliveries.record(database, first, Outcome(200), **fate)
    assert only(database)["state"] == "delivered"
    deliveries.record(database, second, Outcome(500, "answered 500"), **fate)
    assert only(database)["state"] == "delivered"


def test_of_many_senders_each_event_is_claimed_by_one(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        webhook_id, _ = ping(database, settings, receiver.url)
        for _ in range(19):
            registry.queue_ping(database, webhook_id)

        async def run() -> int:
            senders = [Sender(database, settings) for _ in range(3)]
            num = 0
            while sent := sum(await asyncio.gather(*(sender.once() for sender in senders))):
                num += sent
            for sender in senders:
                await sender.close()
            return num

        assert asyncio.run(run()) == 20
    assert len({got.headers["webhook-id"] for got in receiver.got}) == len(receiver.got) == 20


def test_an_event_waits_for_its_jobs_earlier_one_but_not_for_ever_and_not_for_other_jobs(
    database: Database, settings: Settings
) -> None:
    def what_is_sent() -> list[tuple[str, str]]:
        before = len(receiver.got)
        send(database, settings)
        make_due(database)
        with database.write() as connection:  # or else it would be one event at a time from here on
            connection.exec_driver_sql("UPDATE webhooks SET state = 'active'")
        said = [json.loads(got.body) for got in receiver.got[before:]]
        return sorted((event["data"]["job_id"], event["type"]) for event in said)

    with receiving(lambda number: 500) as receiver:
        settings = allowing(settings, receiver.url)
        registry.add(database, settings, receiver.url)
        jobs = []
        for _ in range(2):
            jobs.append(submit_rows(database, settings, 1))
            drain(database)
        for _ in range(deliveries.ORDERED_ATTEMPTS):
            assert what_is_sent() == [(job_id, "job.running") for job_id in sorted(jobs)]
        with database.write() as connection:
            connection.exec_driver_sql(f"DELETE FROM jobs WHERE id = '{jobs[1]}'")
        assert what_is_sent() == [(jobs[0], "job.completed"), (jobs[0], "job.running")]


def test_what_could_not_be_sent_for_days_is_given_up(database: Database, settings: Settings) -> None:
    settings = allowing(settings, "http://127.0.0.1:9/")
    ping(database, settings, "http://127.0.0.1:9/")
    assert deliveries.give_up_old(database, 3600.0) == 0
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE webhook_deliveries SET created_at = '2001-01-01 00:00:00.000000'")
    assert deliveries.give_up_old(database, 3600.0) == 1
    assert only(database)["state"] == "failed"
    assert only(database)["last_error"] == "not delivered within 3600 s (webhooks.max_age_s); before: never tried"


def test_a_receiver_may_ask_for_a_later_attempt(database: Database, settings: Settings) -> None:
    with receiving(lambda number: (503, {"Retry-After": "900"})) as receiver:
        settings = allowing(settings, receiver.url)
        ping(database, settings, receiver.url)
        before = datetime.now(UTC)
        assert send(database, settings) == [1]
    at = datetime.fromisoformat(only(database)["next_attempt_at"])
    assert timedelta(seconds=899) < at - before < timedelta(seconds=960)


def test_after_a_rotation_both_secrets_verify(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        webhook_id, old = ping(database, settings, receiver.url)
        new = registry.rotate(database, webhook_id)[1]
        send(database, settings)
        for secret in (old, new):
            assert verified(receiver, secret)["data"] == {"webhook_id": webhook_id}
        registry.rotate(database, webhook_id, overlap_s=0)
        registry.queue_ping(database, webhook_id)
        send(database, settings)
        with pytest.raises(WebhookVerificationError):
            verified(receiver, new)


def test_a_test_ping_goes_past_the_outbox(database: Database, settings: Settings) -> None:
    with receiving(lambda number: [200, 404][number]) as receiver:
        settings = allowing(settings, receiver.url)
        described, secret = registry.add(database, settings, receiver.url)
        keys = registry.signing_keys(database, described["id"])
        event_id, outcome = asyncio.run(send_ping(settings.webhooks, keys, described["id"]))
        assert outcome == Outcome(200)
        assert verified(receiver, secret)["type"] == "ping"
        assert receiver.got[0].headers["webhook-id"] == event_id
        assert asyncio.run(send_ping(settings.webhooks, keys, described["id"]))[1].error == "answered 404"
    assert deliveries.list_deliveries(database) == []


def test_the_timestamp_that_is_signed_is_the_moment_of_the_attempt(database: Database, settings: Settings) -> None:
    moment = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        _, secret = ping(database, settings, receiver.url)
        send(database, settings, now=lambda: moment)
        with pytest.raises(WebhookVerificationError, match="too old"):
            verified(receiver, secret)
    assert receiver.got[0].headers["webhook-timestamp"] == str(int(moment.timestamp()))


def test_no_secret_and_no_path_is_in_the_log(
    database: Database, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    with receiving(lambda number: [500, 200][number]) as receiver:
        settings = allowing(settings, receiver.url)
        _, secret = ping(database, settings, receiver.url + "/token-in-path")
        send(database, settings)
        make_due(database)
        send(database, settings)
    said = "".join(capsys.readouterr())
    assert "webhook_attempt_failed" in said
    assert "webhook_delivered" in said
    assert secret not in said
    assert secret.removeprefix("whsec_") not in said
    assert "token-in-path" not in said + str(deliveries.list_deliveries(database))


def test_a_cancelled_job_is_told_as_cancelled(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url)
        secret = registry.add(database, settings, receiver.url)[1]
        ending.cancel(database, submit_rows(database, settings, 5))
        send(database, settings)
        said = verified(receiver, secret)
    assert (said["type"], said["data"]["counts"]["cancelled"]) == ("job.cancelled", 5)
