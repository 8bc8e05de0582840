"""Batches that cannot go on yet, of a full queue or on a full disk: they cost little, and hold up no one."""

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from api_support import finish_shard
from batch_desk import NOTHING, Desk
from database_fixtures import BACKENDS
from openai_support import CHAT, age, many
from sqlalchemy import Connection, event, insert, select, true, update

from db.clock import db_now
from db.models import Batch, File
from db.session import Database
from jobs import batch_claims, batch_work, batches, openai_files
from jobs.errors import QueueFull, Unavailable

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)


def limit(desk: Desk, **limits: int) -> None:
    desk.settings = desk.settings.model_copy(update={"limits": desk.settings.limits.model_copy(update=limits)})


def fill(desk: Desk, num_rows: int = 4) -> None:
    """A batch that is in the queue already."""
    desk.create(many(num_rows), "first.jsonl")
    desk.step()


def expire(desk: Desk, file_id: str) -> None:
    with desk.database.write() as connection:
        connection.execute(update(File).where(File.id == file_id).values(expires_at=db_now()))


def never_read(*_: Any) -> Any:
    raise AssertionError("the file was read")


def test_a_batch_of_a_full_queue_waits_without_being_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(desk, max_queued_jobs=1)
    fill(desk)
    batch_id = desk.create(many(3))
    with monkeypatch.context() as patch:
        patch.setattr(batch_work, "read_confined", never_read)
        with pytest.raises(QueueFull, match="max_queued_jobs is 1"):
            desk.step()
    assert desk.state(batch_id) == "validating"
    finish_shard(desk.database)
    desk.end(batch_id, "in_progress")


def test_a_batch_that_is_too_large_for_the_room_there_is_is_read_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(desk, max_queued_rows=6)
    fill(desk)
    batch_id = desk.create(many(4))
    with pytest.raises(QueueFull, match="has 4 more"):
        desk.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch_work, "read_confined", never_read)
        with pytest.raises(QueueFull, match="has 4 more"):
            desk.step()
    finish_shard(desk.database)
    desk.end(batch_id, "in_progress")


def test_who_waited_in_vain_comes_after_the_others(desk: Desk) -> None:
    first, second = desk.create(many(1)), desk.create(many(2))

    def order() -> list[str]:
        return [todo.batch_id for todo in batch_work.look(desk.database, desk.settings)]

    assert order() == [first, second]
    for batch_id, then in ((first, [second, first]), (second, [first, second])):
        assert batch_claims.claim(desk.database, batch_id, "A", 60)
        batch_claims.release(desk.database, batch_id, "A")
        assert order() == then
    third = desk.create(many(3))
    assert order() == [first, second, third]  # nor do new ones keep it from its turn


def test_a_look_reads_open_batches_alone(desk: Desk) -> None:
    desk.create(many(1))
    with desk.database.write() as connection:
        batch = connection.execute(select(Batch.__table__)).one()._asdict()
        ended = ({**batch, "id": f"batch_{number:026}", "state": "completed"} for number in range(2000))
        connection.execute(insert(Batch.__table__), list(ended))
        connection.exec_driver_sql("ANALYZE")
    seen: list[tuple[str, Any]] = []
    event.listen(desk.database.engine, "before_cursor_execute", lambda *args: seen.append((args[2], args[3])))
    assert len(batch_work.look(desk.database, desk.settings)) == 1
    assert list(openai_files.reclaim(desk.database, desk.settings)) == []
    queries = [(text, values) for text, values in seen if "FROM batches" in text]
    assert len(queries) == 2
    for query, values in queries:
        with desk.database.read() as connection:
            explain = "EXPLAIN QUERY PLAN" if desk.database.is_sqlite else "EXPLAIN"
            plan = str(connection.exec_driver_sql(f"{explain} {query}", values).all())
        assert "ix_batches_open" in plan, plan


def test_lists_do_not_read_templates(desk: Desk) -> None:
    batch_id = desk.create(many(1), options={"template": "x" * 1000})
    seen: list[str] = []
    event.listen(desk.database.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    batches.list_batches(desk.database, None)
    desk.see(batch_id)
    queries = [text for text in seen if "FROM batches" in text]
    assert len(queries) == 2
    assert [text for text in queries if "options" in text] == []


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_input_that_expires_while_its_batch_waits_stays(desk: Desk, is_deleted: bool) -> None:
    limit(desk, max_queued_jobs=1)
    fill(desk)
    batch_id = desk.create(many(3))
    file_id = desk.see(batch_id)["input_file_id"]
    if is_deleted:
        openai_files.delete_file(desk.database, file_id, None)
    else:
        expire(desk, file_id)
    age(desk.settings)
    for dry_run in (True, False):
        assert list(openai_files.reclaim(desk.database, desk.settings, dry_run=dry_run)) == []
    finish_shard(desk.database)
    desk.end(batch_id, "in_progress")
    list(openai_files.reclaim(desk.database, desk.settings))
    with desk.database.read() as connection:
        assert file_id not in connection.scalars(select(File.id)).all()


def test_a_batch_that_is_just_being_made_of_a_file_keeps_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file expires between the look at it and the commit."""
    file_id = desk.upload(many(1))
    expire(desk, file_id)
    forgotten: list[bool] = []
    reclaimer = threading.Thread(target=lambda: forgotten.append(openai_files._forget(desk.database, file_id)))
    views = batches._views

    def before_the_commit(*args: Any) -> Any:
        reclaimer.start()
        reclaimer.join(0.5)
        assert reclaimer.is_alive()
        return views(*args)

    monkeypatch.setattr(openai_files, "IS_LIVE", true())
    monkeypatch.setattr(batches, "_views", before_the_commit)
    batches.create(desk.database, desk.settings, batches.NewBatch(file_id, CHAT, "24h"), "default", None)
    reclaimer.join()
    assert forgotten == [False]


def test_two_processes_that_remove_the_last_names_of_content_at_once_remove_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has deleted one name before it can see that the other's is gone, and neither comes across the other's."""
    monkeypatch.setattr(openai_files, "_PER_PAGE", 1)
    one, two = sorted(desk.upload(b"the same", name) for name in ("1.jsonl", "2.jsonl"))
    age(desk.settings)
    expire(desk, two)
    early, late = (Database(desk.settings.sqlalchemy_url) for _ in range(2))
    early_reclaim, late_reclaim = (
        threading.Thread(target=lambda each=each: list(openai_files.reclaim(each, desk.settings)))
        for each in (early, late)
    )
    late_has_deleted = threading.Event()

    def early_commits(connection: Connection) -> None:
        if not connection.get_execution_options().get("forq_write"):  # it has listed what expired: `two` alone
            expire(desk, one)
        elif late_reclaim.ident is None:
            late_reclaim.start()
            late_has_deleted.wait(1.0)  # in vain on SQLite, which has one writer

    def late_commits(connection: Connection) -> None:
        if connection.get_execution_options().get("forq_write"):
            late_has_deleted.set()
            early_reclaim.join(10.0)

    event.listen(early.engine, "commit", early_commits)
    event.listen(late.engine, "commit", late_commits)
    early_reclaim.start()
    early_reclaim.join()
    late_reclaim.join()
    assert desk.count(File) == 0
    assert list(desk.settings.data_dir.iterdir()) == []
    early.dispose()
    late.dispose()


def test_a_temporary_folder_that_is_full_lets_a_batch_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = desk.create(many(2))
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nonexistent/folder")
        with pytest.raises(Unavailable, match=r"No such file.*check space and rights in /nonexistent/folder"):
            batch_work.validate(desk.database, desk.settings, batch_id, NOTHING)

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(tempfile, "tempdir", None)
        for name in ("mkdir", "symlink_to"):
            patch.setattr(Path, name, full)
            with pytest.raises(Unavailable, match="No space left"):
                batch_work.validate(desk.database, desk.settings, batch_id, NOTHING)
    assert desk.state(batch_id) == "validating"
    desk.end(batch_id, "in_progress")
