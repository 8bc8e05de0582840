"""The sender as a part that runs: it stops at once, and outlives a database that is away."""

import asyncio
import threading

import pytest
from receiver import allowing, make_due, receiving
from webhook_steps import only, ping, send

from db.session import Database
from jobs.settings import Settings
from jobs.webhooks.sender import Sender


def test_a_sender_stops_at_once_while_a_receiver_is_silent_and_the_event_is_not_lost(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.webhooks.sender.GRACE_S", 0.05)
    release = threading.Event()
    with receiving(lambda number: release if number == 0 else 200) as receiver:
        settings = allowing(settings, receiver.url, timeout_s=60)
        ping(database, settings, receiver.url)

        async def run() -> None:
            stop = asyncio.Event()
            running = asyncio.create_task(Sender(database, settings).run(stop))
            await asyncio.to_thread(receiver.wait)
            stop.set()
            await running  # or else it waits for the receiver until the test's own time is over

        asyncio.run(run())
        assert only(database)["state"] == "pending"
        assert not release.is_set()
        release.set()
        make_due(database)
        assert send(database, settings) == [1]
    assert only(database)["state"] == "delivered"


def test_a_sender_outlives_an_absent_database(database: Database, settings: Settings) -> None:
    with receiving() as receiver:
        settings = allowing(settings, receiver.url, poll_s=0.02)
        ping(database, settings, receiver.url)

        async def run() -> None:
            stop = asyncio.Event()
            with database.write() as connection:
                connection.exec_driver_sql("ALTER TABLE webhooks RENAME TO elsewhere")
            sender = Sender(database, settings)
            running = asyncio.create_task(sender.run(stop))
            while not sender._is_away:
                await asyncio.sleep(0.01)
            with database.write() as connection:
                connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO webhooks")
            await asyncio.to_thread(receiver.wait)
            stop.set()
            await running

        asyncio.run(run())
    assert only(database)["state"] == "delivered"
