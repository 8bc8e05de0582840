"""An outage is one line when it begins and one when it is over, however many loops meet it."""

import sqlite3
import threading
from typing import Any

import pytest
import structlog
from sqlalchemy.exc import OperationalError

from worker import database_retry
from worker.database_retry import Outage, retrying


def gone() -> OperationalError:
    return OperationalError("SELECT 1", {}, Exception("connection refused"))


def test_many_loops_say_one_line() -> None:
    now = [100.0]
    outage = Outage(lambda: now[0])
    with structlog.testing.capture_logs() as lines:
        outage.over(0)
        for loop in range(64):
            outage.note(loop, gone())
        for loop in range(64):
            now[0] += 0.1
            outage.over(loop)
            outage.over(loop)
        outage.note(0, gone())
    assert [(line["event"], line.get("reason"), line.get("after_s")) for line in lines] == [
        ("database_unreachable", "Exception", None),
        ("database_back", None, 6.4),
        ("database_unreachable", "Exception", None),
    ]


def test_whoever_is_served_beside_one_that_is_not_does_not_end_the_outage() -> None:
    """As on a full disk, where small writes succeed and large ones do not."""
    outage = Outage()
    with structlog.testing.capture_logs() as lines:
        outage.note("large", OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")))
        for _ in range(10):
            outage.note("small", gone())
            outage.over("small")
        outage.over("large")
    assert [line["event"] for line in lines] == ["database_unreachable", "database_back"]
    assert lines[0]["reason"] == "database or disk is full"


def test_work_goes_on_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_retry, "outage", Outage())
    monkeypatch.setattr(retrying, "longest_wait_s", 0.01)
    answers: list[Any] = [gone(), gone(), gone(), "answer"]

    def action() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with structlog.testing.capture_logs() as lines:
        assert retrying.call(threading.Event(), action) == "answer"
    assert [line["event"] for line in lines] == ["database_unreachable", "database_back"]


def test_a_worker_that_stops_does_not_wait_for_the_database() -> None:
    stopping = threading.Event()
    stopping.set()

    def action() -> None:
        raise gone()

    with pytest.raises(OperationalError):
        retrying.call(stopping, action)


def test_other_errors_are_not_retried() -> None:
    def action() -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        retrying.call(threading.Event(), action)
