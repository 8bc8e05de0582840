"""An outage is one line when it begins and one when it is over, however many loops meet it."""

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
        outage.over()
        for _ in range(64):
            outage.note(gone())
        now[0] += 12.34
        outage.over()
        outage.over()
        outage.note(gone())
    assert [(line["event"], line.get("reason"), line.get("after_s")) for line in lines] == [
        ("database_unreachable", "OperationalError", None),
        ("database_back", None, 12.3),
        ("database_unreachable", "OperationalError", None),
    ]


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
