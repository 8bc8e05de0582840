"""How batches go on: every change of state is a compare-and-swap, whoever makes it, and after every death."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from api_support import finish_shard
from batch_desk import NOTHING, Desk, check_sums
from database_fixtures import BACKENDS
from openai_support import CHAT, many
from sqlalchemy import update

from db.clock import db_now
from db.models import Batch, File, Job
from jobs import batch_claims, batch_work, batches, ending, leases, store
from jobs.errors import Conflict, Unavailable
from jobs.settings import DEFAULT_MODEL

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)


def test_a_batch_that_is_answered_ends_completed(desk: Desk) -> None:
    batch_id = desk.create(many(6))
    assert desk.state(batch_id) == "validating"
    assert desk.step() == 1
    assert desk.see(batch_id)["request_counts"] == {"total": 6, "completed": 0, "failed": 0}
    finish_shard(desk.database, failing=(1,))
    assert desk.step() == 0
    assert desk.see(batch_id)["request_counts"] == {"total": 6, "completed": 3, "failed": 1}
    finish_shard(desk.database)
    assert desk.step() == 1
    batch = check_sums(desk, batch_id, 6)
    assert batch["status"] == "completed"
    assert batch["usage"]["total_tokens"] == 5 * (5 + 3)
    (error,) = desk.outputs(batch_id)[1]
    assert error["response"]["status_code"] == 500
    assert error["response"]["body"]["error"]["message"] == "it broke"
    assert desk.step() == 0


def test_rows_that_all_fail_still_end_completed_without_an_output_file(desk: Desk) -> None:
    batch_id = desk.create(many(2, temperature=9))
    desk.step()
    leases.sweep(desk.database)  # a job of refused rows alone has nothing to lease
    finish_shard(desk.database)
    batch = desk.end(batch_id, "completed")
    assert batch["output_file_id"] is None
    assert len(desk.file(batch["error_file_id"])) == 2


def test_a_process_that_dies_in_any_state_leaves_what_the_next_one_goes_on_with(desk: Desk) -> None:
    """Each `step` is another process's: nothing is in memory between them. Each dies after half of its work, too."""
    batch_id = desk.create(many(5))

    def dies(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    def die_within(state: str) -> None:
        (todo,) = batch_work.look(desk.database, desk.settings)
        with pytest.raises(KeyboardInterrupt):
            todo.do(desk.database, desk.settings, todo.batch_id, dies)
        assert desk.state(batch_id) == state

    die_within("validating")
    assert (desk.count(Job), desk.count(File)) == (0, 1)
    desk.step()
    assert desk.state(batch_id) == "in_progress"
    finish_shard(desk.database)
    finish_shard(desk.database)
    die_within("finalizing")
    assert (desk.count(Job), desk.count(File)) == (1, 1)
    desk.step()
    assert check_sums(desk, batch_id, 5)["status"] == "completed"
    assert desk.count(File) == 2
    assert not list(desk.settings.data_dir.glob(".*"))


def test_two_processes_that_validate_one_batch_make_one_job(desk: Desk) -> None:
    batch_id = desk.create(many(3))
    at_once(desk, lambda: batch_work.validate(desk.database, desk.settings, batch_id, NOTHING))
    assert desk.count(Job) == 1
    assert desk.state(batch_id) == "in_progress"


def test_two_processes_that_finalize_one_batch_make_its_files_once(desk: Desk) -> None:
    batch_id = desk.create(many(3))
    desk.step()
    finish_shard(desk.database, failing=(2,))
    batch_work.look(desk.database, desk.settings)
    at_once(desk, lambda: batch_work.write_out(desk.database, desk.settings, batch_id, NOTHING))
    assert desk.count(File) == 3  # input, output, errors
    check_sums(desk, batch_id, 3)


def at_once(desk: Desk, work: Callable[[], None], num: int = 4) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=run) for _ in range(num)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_a_creation_that_is_retried_at_once_by_many_is_one_batch(desk: Desk) -> None:
    new = batches.NewBatch(desk.upload(many(1)), CHAT, "24h")
    made: list[str] = []
    at_once(desk, lambda: made.append(batches.create(desk.database, desk.settings, new, "default", None)["id"]), 6)
    assert len(made) == 6
    assert len(set(made)) == 1
    other = batches.NewBatch(new.input_file_id, CHAT, "24h", labels={"run": "2"})
    assert batches.create(desk.database, desk.settings, other, "default", None)["id"] not in made
    assert batches.create(desk.database, desk.settings, new, "another", None)["id"] not in made


def test_a_creation_is_new_again_after_a_while_and_when_the_first_was_given_up(desk: Desk) -> None:
    new = batches.NewBatch(desk.upload(many(1)), CHAT, "24h")

    def again() -> str:
        return str(batches.create(desk.database, desk.settings, new, "default", None)["id"])

    first = again()
    batches.cancel(desk.database, first, None)
    second = again()
    assert second != first
    with desk.database.write() as connection:
        long_ago = db_now(-desk.settings.batches.repeat_s - 1)
        connection.execute(update(Batch).where(Batch.id == second).values(created_at=long_ago))
    assert again() not in (first, second)


def test_a_claim_is_one_processs_until_it_lapses(desk: Desk) -> None:
    batch_id = desk.create(many(1))
    assert batch_claims.claim(desk.database, batch_id, "A", 60)
    assert not batch_claims.claim(desk.database, batch_id, "B", 60)
    assert batch_work.look(desk.database, desk.settings) == []
    batch_claims.release(desk.database, batch_id, "B")
    assert not batch_claims.claim(desk.database, batch_id, "B", 60)
    batch_claims.renew(desk.database, [batch_id], "A", -1)
    assert batch_claims.claim(desk.database, batch_id, "B", 60)
    batch_claims.release(desk.database, batch_id, "B")
    assert len(batch_work.look(desk.database, desk.settings)) == 1


@pytest.mark.parametrize("num_answered", [0, 1, 2, 3])
def test_a_batch_that_is_cancelled_keeps_its_answers(desk: Desk, num_answered: int) -> None:
    batch_id = desk.create(many(12))
    desk.step()
    for _ in range(num_answered):
        finish_shard(desk.database)
    if num_answered == 3:  # its rows have ended: nobody has looked yet
        assert desk.state(batch_id) == "in_progress"
    assert batches.cancel(desk.database, batch_id, None)["status"] == "cancelling"
    assert batches.cancel(desk.database, batch_id, None)["status"] == "cancelling"
    desk.end(batch_id, "cancelled")
    batch = check_sums(desk, batch_id, 12)
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    answers, errors = desk.outputs(batch_id)
    assert len(answers) == 4 * num_answered
    assert {each["error"]["code"] for each in errors} <= {"batch_cancelled"}
    assert {each["response"] for each in errors} <= {None}
    with pytest.raises(Conflict, match="is cancelled"):
        batches.cancel(desk.database, batch_id, None)


def test_a_batch_is_cancelled_while_a_worker_holds_rows_of_it(desk: Desk) -> None:
    batch_id = desk.create(many(8))
    desk.step()
    lease = leases.acquire(desk.database, DEFAULT_MODEL, "W", 60.0)
    assert lease is not None
    batches.cancel(desk.database, batch_id, None)
    assert desk.step() == 0
    assert desk.state(batch_id) == "cancelling"
    leases.abandon(desk.database, lease)
    desk.end(batch_id, "cancelled")
    check_sums(desk, batch_id, 8)


def test_a_worker_that_died_does_not_keep_a_batch_cancelling_where_no_other_lives(desk: Desk) -> None:
    batch_id = desk.create(many(8))
    desk.step()
    assert leases.acquire(desk.database, DEFAULT_MODEL, "W", -1.0) is not None  # it has expired
    batches.cancel(desk.database, batch_id, None)
    desk.end(batch_id, "cancelled")
    check_sums(desk, batch_id, 8)


def test_a_batch_that_is_cancelled_while_it_is_validated_leaves_no_job(desk: Desk) -> None:
    batch_id = desk.create(many(3))

    def cancel_meanwhile(phase: str, done: int, total: int) -> None:
        if phase == "reading" and desk.state(batch_id) == "validating":
            batches.cancel(desk.database, batch_id, None)

    batch_work.validate(desk.database, desk.settings, batch_id, cancel_meanwhile)
    assert desk.state(batch_id) == "cancelled"
    assert desk.count(Job) == 0
    assert desk.see(batch_id)["request_counts"]["total"] == 0
    assert desk.outputs(batch_id) == ([], [])


@pytest.mark.parametrize("num_answered", [0, 1])
def test_a_batch_whose_window_ends_is_expired_with_the_answers_it_has(desk: Desk, num_answered: int) -> None:
    batch_id = desk.create(many(8), window="1m")
    desk.step()
    for _ in range(num_answered):
        finish_shard(desk.database)
    desk.is_late(batch_id)
    batch_work.look(desk.database, desk.settings)
    assert desk.see(batch_id)["expired_at"] is None  # not before it is
    batch = desk.end(batch_id, "expired")
    assert batch["finalizing_at"] <= batch["expired_at"]
    assert batch["completed_at"] is None
    check_sums(desk, batch_id, 8)
    assert {each["error"]["code"] for each in desk.outputs(batch_id)[1]} == {"batch_expired"}


def test_a_batch_whose_last_row_was_answered_in_time_is_completed(desk: Desk) -> None:
    batch_id = desk.create(many(4))
    desk.step()
    finish_shard(desk.database)
    desk.is_late(batch_id)
    batch = desk.end(batch_id, "completed", "expired")
    assert (batch["status"], batch["expired_at"]) == ("completed", None)


def test_a_batch_that_nobody_looked_at_in_time_is_expired_without_a_job(desk: Desk) -> None:
    batch_id = desk.create(many(4))
    desk.is_late(batch_id)
    batch = desk.end(batch_id, "expired")
    assert batch["expired_at"] is not None
    assert desk.count(Job) == 0


def test_a_process_that_died_between_expiry_and_stopping_the_job_is_made_up_for(desk: Desk) -> None:
    batch_id = desk.create(many(4))
    desk.step()
    with desk.database.write() as connection:
        late = {"state": "finalizing", "finalizing_at": db_now(), "expired_at": db_now()}
        connection.execute(update(Batch).where(Batch.id == batch_id).values(**late))
    desk.end(batch_id, "expired")
    check_sums(desk, batch_id, 4)


def test_a_job_that_its_owner_cancels_ends_its_batch_as_cancelled(desk: Desk) -> None:
    batch_id = desk.create(many(8))
    desk.step()
    finish_shard(desk.database)
    ending.cancel(desk.database, desk.see(batch_id)["forq"]["job_id"])
    desk.end(batch_id, "cancelled")
    check_sums(desk, batch_id, 8)


def test_a_job_that_fails_as_a_whole_ends_its_batch_with_error_lines(desk: Desk) -> None:
    batch_id = desk.create(many(4))
    desk.step()
    ending.fail_job(desk.database, desk.see(batch_id)["forq"]["job_id"], "no worker can run it")
    desk.end(batch_id, "completed")
    check_sums(desk, batch_id, 4)
    assert {each["response"]["status_code"] for each in desk.outputs(batch_id)[1]} == {500}


def test_a_job_that_is_retried_before_its_output_is_written_runs_again_first(desk: Desk) -> None:
    batch_id = desk.create(many(4))
    desk.step()
    finish_shard(desk.database, failing=(0,))
    batch_work.look(desk.database, desk.settings)
    assert desk.state(batch_id) == "finalizing"
    job_id = desk.see(batch_id)["forq"]["job_id"]

    def retry_meanwhile(*_: Any) -> None:
        ending.retry(desk.database, job_id)

    batch_work.write_out(desk.database, desk.settings, batch_id, retry_meanwhile)
    assert desk.count(File) == 1
    desk.step()
    assert desk.state(batch_id) == "in_progress"
    finish_shard(desk.database)
    desk.end(batch_id, "completed")
    assert check_sums(desk, batch_id, 4)["request_counts"]["failed"] == 0


def test_a_disk_that_is_full_lets_a_batch_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = desk.create(many(4))
    desk.step()
    finish_shard(desk.database)
    batch_work.look(desk.database, desk.settings)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", full)
        with pytest.raises(Unavailable, match="No space left"):
            batch_work.write_out(desk.database, desk.settings, batch_id, NOTHING)
    assert desk.state(batch_id) == "finalizing"
    assert not list(desk.settings.data_dir.glob(".*"))
    desk.step()
    check_sums(desk, batch_id, 4)
