"""Receipts and exports under trouble, and the loop that keeps them going."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import jobs.drop.outbox
from db.session import Database
from jobs.drop.inbox import Inbox


def test_an_export_that_fails_is_told_in_the_receipt_and_tried_again_ever_more_rarely(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    desk.answer_all()
    tries = []

    def full(*args: Any, **kw: Any) -> Any:
        tries.append(desk.now_s)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jobs.drop.outbox.export_job", full)
        for _ in range(100):
            assert desk.scan_after(1.0).exported == []
    assert len(tries) == 7, "after 1, 2, 4, 8, 16 and 32 s"
    receipt = desk.receipt("q")
    assert (receipt["error"], receipt["results"]) == ("[Errno 28] No space left on device", None)
    assert desk.scan_after(64.0).exported == ["q.parquet"]
    assert desk.receipt("q")["error"] is None


def test_an_input_that_is_missing_holds_only_its_own_export_back(desk: Any) -> None:
    desk.drop("a.parquet", ["one"])
    desk.drop("b.parquet", ["two"])
    desk.settle()
    desk.answer_all()
    job_a = desk.receipt("a")["job_id"]
    (desk.home / "data" / next(job.data_key for job in desk.jobs() if job.id == job_a)).unlink()
    assert desk.scan_after(1.0).exported == ["b.parquet"]
    assert "export where it was submitted" in desk.receipt("a")["error"]


def test_a_job_that_the_database_lost_is_told_in_the_receipt(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    with desk.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")
    desk.scan_after(1.0)
    assert "is not in the database: drop the file again" in desk.receipt("q")["error"]


def test_thousands_of_old_receipts_are_read_once(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    desk.answer_all()
    desk.scan_after(1.0)
    text = (desk.home / "outbox" / "q.job.json").read_text()
    for number in range(3000):
        (desk.home / "outbox" / f"old{number}.job.json").write_text(text)
    (desk.home / "outbox" / "foreign.job.json").write_text("{")
    desk.start()
    reads = []
    read_receipt = jobs.drop.outbox.read_receipt
    monkeypatch.setattr("jobs.drop.outbox.read_receipt", lambda path: (reads.append(path), read_receipt(path))[1])
    desk.inbox.scan()
    assert len(reads) == 3002
    desk.drop("new.parquet", ["two"])
    for _ in range(5):
        desk.scan_after(1.0)
    desk.answer_all()
    assert desk.scan_after(1.0).exported == ["new.parquet"]
    assert len(reads) <= 3003, "only a receipt that changed is read again"


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_run_watches_until_it_is_stopped_whatever_happens(make_desk: Any, database: Database) -> None:
    desk = make_desk(poll_s=0.02, settle_s=0.1, give_up_s=0.3)
    inbox = Inbox(desk.settings, database, ring=desk.ring)
    stop = threading.Event()
    runner = threading.Thread(target=inbox.run, args=(stop,))
    runner.start()
    try:
        desk.drop("q.parquet", ["one"])
        desk.path("bad.parquet").write_text("never a footer")
        until(lambda: (desk.home / "rejected" / "bad.parquet").exists())
        until(lambda: (desk.home / "outbox" / "q.job.json").exists())
        (desk.home / "outbox").rename(desk.home / "gone")  # every scan fails for a while
        (desk.home / "outbox").write_text("in the way")
        time.sleep(0.1)
        assert runner.is_alive()
        (desk.home / "outbox").unlink()
        (desk.home / "gone").rename(desk.home / "outbox")
        desk.answer_all()
        until(lambda: desk.receipt("q")["results"] == "q.parquet")
    finally:
        stop.set()
        runner.join(10.0)
    assert not runner.is_alive()
