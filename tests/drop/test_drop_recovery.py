"""Kills, swaps, absent databases, full disks: nothing is lost, nothing is done twice, nothing loops."""

import errno
import os
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import db.session
import jobs.drop.inbox
import jobs.drop.outbox
from db.session import Database
from jobs.drop.claim import Claim, alone
from jobs.settings import Settings


class Killed(BaseException):
    """Passes every `except Exception`, as kill -9 does."""


def die(*_: Any, **__: Any) -> Any:
    raise Killed


CRASHES = [
    ("jobs.drop.inbox.submit_file", "between claim and submit"),
    ("jobs.drop.outbox.Outbox.open_receipt", "between submit and receipt"),
    ("jobs.drop.claim.Claim.accept", "between receipt and accepted"),
    ("jobs.drop.claim.Claim.close", "before the claim is closed"),
]


@pytest.mark.parametrize(("where", "when"), CRASHES, ids=[when for _, when in CRASHES])
def test_a_watcher_killed_at_any_moment_makes_one_job_and_one_receipt(
    desk: Any, monkeypatch: pytest.MonkeyPatch, where: str, when: str
) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").write_text("max_tokens = 9")
    desk.inbox.scan()
    with monkeypatch.context() as patch:
        patch.setattr(where, die)
        with pytest.raises(Killed):
            desk.scan_after(2.0)
    assert desk.listing("inbox") == []
    desk.start()
    desk.settle()
    (job,) = desk.jobs()
    assert job.sampling == {"max_tokens": 9}
    assert [name for name in desk.listing("outbox") if name.endswith(".job.json")] == ["q.job.json"]
    assert desk.receipt("q")["job_id"] == job.id
    assert desk.receipt("q")["duplicate"] is False
    assert desk.listing("accepted") == [f"{job.id}-q.job.toml", f"{job.id}-q.parquet"]
    assert desk.claims() == []
    desk.answer_all()
    assert desk.scan_after(1.0).exported == ["q.parquet"]


def test_a_watcher_killed_before_it_took_the_data_file_gives_the_job_toml_back(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").write_text("max_tokens = 9")
    desk.inbox.scan()
    rename = Path.rename

    def only_toml(self: Path, target: Any) -> Path:
        return rename(self, target) if self.suffix == ".toml" else die()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", only_toml)
        with pytest.raises(Killed):
            desk.scan_after(2.0)
    assert desk.listing("inbox") == ["q.parquet"]
    desk.start()
    desk.settle()
    assert [job.sampling for job in desk.jobs()] == [{"max_tokens": 9}]


def test_a_watcher_killed_while_rejecting_finishes_that(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").write_text("wrong = 1")
    desk.inbox.scan()
    move = jobs.drop.claim.move

    def only_toml(source: Path, target: Path) -> None:
        move(source, target) if source.suffix == ".toml" else die()

    with monkeypatch.context() as patch:
        patch.setattr("jobs.drop.claim.move", only_toml)
        with pytest.raises(Killed):
            desk.scan_after(2.0)
    desk.start()
    assert desk.inbox.scan().rejected == ["q.parquet"]
    assert desk.listing("rejected") == ["q.parquet", "q.parquet.job.toml", "q.parquet.reason.txt"]
    assert "'wrong' is not a known key" in desk.reason("q.parquet")
    assert (desk.jobs(), desk.claims()) == ([], [])


def test_a_watcher_killed_before_the_export_does_it_at_the_next_start(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    desk.answer_all()
    with monkeypatch.context() as patch:
        patch.setattr("jobs.drop.outbox.write_text", die)
        with pytest.raises(Killed):
            desk.scan_after(1.0)
    (desk.home / "outbox" / f".q.parquet.{os.getpid()}.0a1b2c3d.tmp").write_text("half")
    desk.start()
    assert desk.inbox.scan().exported == ["q.parquet"]
    assert sorted(os.listdir(desk.home / "outbox")) == ["q.job.json", "q.parquet"]


def swap_before_claim(monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path], Any]) -> None:
    take = Claim.take
    swapped = []

    def swap_and_take(folder: Path, data: Path, *rest: Any) -> Claim:
        if not swapped:
            swapped.append(data)
            data.unlink()
            swap(data)
        return take(folder, data, *rest)

    monkeypatch.setattr(Claim, "take", swap_and_take)


def test_a_file_exchanged_after_the_check_is_judged_again(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.drop("q.parquet", ["checked"])
    swap_before_claim(monkeypatch, lambda path: desk.drop(path.name, ["exchanged, and longer"]))
    assert desk.settle().submitted == []
    assert desk.scan_after(1.0).submitted == []
    assert len(desk.scan_after(2.0).submitted) == 1
    desk.answer_all()
    desk.inbox.scan()
    assert desk.results("q.parquet")[0]["forq_output"] == "answer to exchanged, and longer"


def test_a_link_put_in_place_of_a_checked_file_is_never_followed(
    desk: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = desk.drop("../../secret.parquet", ["secret"])
    desk.drop("q.parquet", ["checked"])
    swap_before_claim(monkeypatch, lambda path: path.symlink_to(secret))
    assert desk.settle().submitted == []
    assert desk.scan_after(1.0).rejected == ["q.parquet"]
    assert "symbolic link" in desk.reason("q.parquet")
    assert desk.jobs() == []


def test_a_file_written_to_while_it_is_submitted_starts_over(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = jobs.store.keep

    def write_and_keep(settings: Settings, source: Path, *rest: Any, **kw: Any) -> str:
        monkeypatch.setattr("jobs.store.keep", keep)
        pq.write_table(pa.table({"prompt": ["second, and longer"]}), source)  # in place: the same inode
        return keep(settings, source, *rest, **kw)

    desk.drop("q.parquet", ["first"])
    monkeypatch.setattr("jobs.store.keep", write_and_keep)
    done = desk.settle()
    assert (done.submitted, done.rejected, done.num_waiting) == ([], [], 1)
    desk.scan_after(1.0)
    assert len(desk.scan_after(2.0).submitted) == 1
    desk.answer_all()
    desk.inbox.scan()
    assert desk.results("q.parquet")[0]["forq_output"] == "answer to second, and longer"


def test_a_database_that_is_locked_for_a_while_delays_the_job(
    tmp_path: Path, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db.session, "SQLITE_BUSY_TIMEOUT_S", 0.05)
    desk.database = Database(f"sqlite:///{tmp_path / 'forq.db'}")
    desk.start()
    desk.drop("q.parquet", ["one"])
    desk.drop("r.parquet", ["two"])
    other = sqlite3.connect(tmp_path / "forq.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    done = desk.settle()
    assert (done.submitted, done.is_database_away, done.num_waiting) == ([], True, 2)
    other.execute("ROLLBACK")
    desk.scan_after(1.0)
    desk.settle()
    assert len(desk.jobs()) == 2
    assert (desk.receipt("q")["duplicate"], desk.claims()) == (False, [])
    desk.database.dispose()


def test_a_database_that_is_away_is_told_once_and_the_files_wait(
    desk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = desk.database
    desk.database = Database(f"sqlite:///{tmp_path / 'empty.db'}")  # has no tables: nothing can be asked of it
    desk.start()
    desk.drop("q.parquet", ["one"])
    desk.path("bad.parquet").symlink_to("q.parquet")
    for _ in range(10):
        assert desk.scan_after(1.0).is_database_away
    assert desk.listing("inbox") == ["q.parquet"]
    assert desk.listing("rejected") == ["bad.parquet", "bad.parquet.reason.txt"]
    assert "".join(capsys.readouterr()).count("drop_database_away") == 1
    desk.database.dispose()
    desk.inbox._database = desk.inbox.outbox._database = desk.database = good
    assert len(desk.scan_after(1.0).submitted) == 1


def test_a_full_disk_holds_the_file_back_and_rejects_nothing(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.drop("q.parquet", ["one"])
    publish = jobs.store.publish

    def full(temporary: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jobs.store.publish", full)
        for _ in range(200):
            done = desk.scan_after(1.0)
            assert done.rejected == []
    assert jobs.store.publish is publish
    for _ in range(400):
        done = desk.scan_after(1.0)
    assert len(desk.jobs()) == 1
    assert desk.listing("rejected") == []


def test_a_full_queue_holds_the_file_back_until_there_is_room(desk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = desk.settings.limits.model_copy(update={"max_queued_jobs": 1})
    desk.settings = desk.settings.model_copy(update={"limits": limits})
    desk.start()
    desk.drop("first.parquet", ["one"])
    assert len(desk.settle().submitted) == 1
    desk.drop("second.parquet", ["two"])
    for _ in range(6):
        done = desk.scan_after(20.0)
        assert (done.submitted, done.rejected) == ([], [])
    assert done.num_waiting == 1
    assert desk.answer_all() == 1
    desk.scan_after(400.0)
    assert len(desk.jobs()) == 2
    assert desk.listing("rejected") == []
    log = "".join(capsys.readouterr())
    said = Counter(re.findall(r"drop_held_back\w*", log))
    assert said == {"drop_held_back": 1, "drop_held_back_over": 1}  # not a line for every try
    assert "limits.max_queued_jobs is 1" in log


def test_a_file_that_always_kills_the_watcher_is_rejected_in_the_end(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.drop.inbox.submit_file", die)
    desk.drop("q.parquet", ["one"])
    for _ in range(jobs.drop.inbox.MAX_TRIES):
        desk.start().scan()
        with pytest.raises(Killed):
            desk.scan_after(2.0)
    desk.start()
    assert desk.settle().rejected == ["q.parquet"]
    assert "5 tries to submit it ended unexpectedly" in desk.reason("q.parquet")


def test_an_unexpected_error_of_one_file_does_not_stop_the_others(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = jobs.drop.inbox.submit_file

    def sometimes(database: Any, settings: Any, path: Path, *rest: Any) -> Any:
        if path.name == "a.parquet":
            raise ZeroDivisionError
        return submit(database, settings, path, *rest)

    monkeypatch.setattr("jobs.drop.inbox.submit_file", sometimes)
    desk.drop("a.parquet", ["one"])
    desk.drop("b.parquet", ["two"])
    assert len(desk.settle().submitted) == 1
    for _ in range(60):
        desk.scan_after(1.0)
    assert "ended unexpectedly" in desk.reason("a.parquet")


def test_a_second_watcher_on_the_same_home_leaves_the_work_to_the_first(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    with alone(desk.home / "inbox" / ".claimed"):
        done = desk.scan_after(1.0)
    assert done.is_busy
    assert not desk.scan_after(1.0).is_busy


def test_a_stop_in_the_middle_of_a_submit_leaves_the_file_claimed_and_no_job(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    submit = jobs.drop.inbox.submit_file

    def stopped(database: Any, settings: Settings, path: Path, options: Any, progress: Any) -> Any:
        stop.set()
        return submit(database, settings, path, options, progress)

    desk.drop("q.parquet", ["one"])
    desk.inbox.scan()
    desk.now_s += 2.0
    with monkeypatch.context() as patch:
        patch.setattr("jobs.drop.inbox.submit_file", stopped)
        desk.inbox.run(stop)
    assert desk.jobs() == []
    desk.start()
    assert len(desk.settle().submitted) == 1
