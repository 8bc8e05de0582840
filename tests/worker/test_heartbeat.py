"""The worker's pulse: what it does with leases nobody works on, and with shards nobody was rung for."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import PATIENCE_S, NumberEncoder, ScriptedBackend, shards_of, submit

from db.session import Database
from jobs import leases
from jobs.settings import DEFAULT_MODEL, QueueSettings, Settings
from worker.heartbeat import Heartbeat
from worker.shards import ShardLoop

OWNER = "A" * 26


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(home=tmp_path / "home", queue=QueueSettings(shard_rows=4, rows_in_flight=64))


def make(database: Database, settings: Settings, wake: Callable[[], object] = lambda: None) -> Heartbeat:
    loop = ShardLoop(database, settings, OWNER, DEFAULT_MODEL, ScriptedBackend(), NumberEncoder())  # type: ignore[arg-type]
    return Heartbeat(database, settings, OWNER, DEFAULT_MODEL, loop, wake)


def test_a_lease_whose_grant_got_lost_on_the_way_is_given_back_at_the_second_beat(
    database: Database, settings: Settings
) -> None:
    job_id = submit(database, settings, 4)
    heartbeat = make(database, settings)
    assert leases.acquire(database, DEFAULT_MODEL, OWNER, 60) is not None  # and nobody hears of it

    heartbeat.beat()
    assert [shard.state for shard in shards_of(database, job_id)] == ["leased"], "it may just have been granted"
    heartbeat.beat()
    (shard,) = shards_of(database, job_id)
    assert (shard.state, shard.attempts) == ("queued", 0)


def test_a_shard_that_waits_rings_the_bell_again(database: Database, settings: Settings) -> None:
    rung = threading.Event()
    heartbeat = make(database, settings, rung.set)
    heartbeat.sweep()
    assert not rung.wait(0.1)
    submit(database, settings, 4)
    heartbeat.sweep()
    assert rung.wait(PATIENCE_S)


def test_a_broker_that_hangs_does_not_stop_the_pulse(database: Database, settings: Settings) -> None:
    """Found by benchmarks.chaos: a stopped broker held the heartbeat for the socket's 30 seconds."""
    asked, answered = threading.Event(), threading.Event()
    calls: list[None] = []

    def hang() -> None:
        calls.append(None)
        asked.set()
        answered.wait(PATIENCE_S)

    submit(database, settings, 4)
    heartbeat = make(database, settings, hang)
    heartbeat.sweep()
    assert asked.wait(PATIENCE_S)
    heartbeat.beat()
    heartbeat.sweep()
    assert len(calls) == 1, "one ring at a time"
    answered.set()
