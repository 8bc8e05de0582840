"""The shard loop over a real SQLite database, with an engine that finishes samples when it is told to."""

from typing import Any

import pytest
from scripted import (
    OWNER,
    Loops,
    ScriptedBackend,
    answer,
    answers_of,
    eventually,
    job_of,
    make_loop,
    receipt,
    refuse,
    rows_of,
    shards_of,
    submit,
    with_queue,
)
from sqlalchemy import update

from db.models import Shard
from db.session import Database
from jobs import ending, leases
from jobs.settings import DEFAULT_MODEL, Settings
from worker.backend import Finished
from worker.heartbeat import Heartbeat
from worker.shards import ShardLoop

OTHER = "B" * 26
NEVER_S = 1000.0


def beat(database: Database, settings: Settings, loop: ShardLoop) -> None:
    """One heartbeat, as the worker's own thread would send it."""
    Heartbeat(database, settings, OWNER, DEFAULT_MODEL, loop, lambda: None).beat()


def steal(database: Database, settings: Settings) -> leases.Lease:
    """The lease expires, a sweep returns it to the queue, another worker takes it."""
    with database.write() as connection:
        connection.execute(update(Shard).values(lease_expires_at=db_past()))
    assert leases.sweep(database) == 1
    lease = leases.acquire(database, DEFAULT_MODEL, OTHER, settings.queue.lease_s)
    assert lease is not None
    return lease


def db_past() -> Any:
    from sqlalchemy import literal

    from db.clock import db_now

    return db_now(literal(-1.0))


def test_rows_of_several_shards_are_in_the_engine_together(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 12)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend), 3)
    backend.wait_for_rows(*range(12))
    backend.finish(*range(12))
    loops.join()
    assert job_of(database, job).state == "completed"
    assert answers_of(database, job) == {row: [f"answer {row}"] for row in range(12)}
    assert backend.aborted == []


def test_a_long_row_at_the_end_of_a_shard_does_not_keep_the_next_shard_waiting(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, 12)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, with_queue(settings, rows_in_flight=4), backend), 3)
    backend.wait_for_rows(0, 1, 2, 3)
    assert [shard.state for shard in shards_of(database, job)] == ["leased", "queued", "queued"]
    backend.finish(0, 1, 2)
    backend.wait_for_rows(3, 4, 5, 6, 7)
    backend.finish(4, 5, 6, 7)
    backend.wait_for_rows(3, 8, 9, 10, 11)
    backend.finish(8, 9, 10, 11)
    eventually(lambda: [s.state for s in shards_of(database, job)] == ["leased", "done", "done"], "two shards done")
    backend.finish(3)
    loops.join()
    assert job_of(database, job).state == "completed"
    assert len(answers_of(database, job)) == 12


def test_one_loop_alone_runs_one_shard_after_the_other(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 10)
    assert make_loop(database, settings, ScriptedBackend(answer)).run_available() == 3
    assert job_of(database, job).state == "completed"
    assert [shard.num_completed for shard in shards_of(database, job)] == [4, 4, 2]


def test_finished_rows_are_stored_while_the_shard_goes_on(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend))
    backend.wait_for_rows(0, 1, 2, 3)
    backend.finish(2)
    eventually(lambda: answers_of(database, job) == {2: ["answer 2"]}, "row 2 is stored")
    assert job_of(database, job).state == "running"
    backend.finish(0, 1, 3)
    loops.join()
    assert job_of(database, job).num_completed == 4


def test_cancelling_keeps_finished_rows_and_takes_the_others_out_of_the_engine(
    database: Database, settings: Settings
) -> None:
    settings = with_queue(settings, flush_s=NEVER_S, rows_in_flight=4)  # the finished row is not written yet
    job = submit(database, settings, 8)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    backend.finish(1)
    eventually(lambda: loop.rows_in_flight.has_room, "the loop has taken row 1")
    assert ending.cancel(database, job) == "cancelling"
    beat(database, settings, loop)
    loops.join()
    assert job_of(database, job).state == "cancelled"
    assert answers_of(database, job) == {1: ["answer 1"]}
    assert [state for state, _ in rows_of(database, job).values()].count("cancelled") == 7
    assert len(backend.aborted) == 3
    assert backend.rows == []
    assert loop.rows_in_flight.has_room


def test_a_lost_lease_aborts_its_rows_and_nothing_is_written(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    stolen = steal(database, settings)
    beat(database, settings, loop)
    loops.join()
    assert len(backend.aborted) == 4
    assert answers_of(database, job) == {}
    shard = shards_of(database, job)[0]
    assert (shard.lease_owner, shard.lease_token, shard.attempts) == (OTHER, stolen.token, 1)


def test_a_lost_lease_that_no_heartbeat_noticed_is_found_by_the_first_write(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend))
    backend.wait_for_rows(0, 1, 2, 3)
    steal(database, settings)
    backend.finish(0)
    loops.join()
    assert len(backend.aborted) == 3
    assert answers_of(database, job) == {}
    assert shards_of(database, job)[0].lease_owner == OTHER


def test_a_heartbeat_sent_before_the_lease_was_taken_says_nothing_about_it(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    beat(database, settings, loop)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    backend.finish(0, 1, 2, 3)
    loops.join()
    assert job_of(database, job).state == "completed"


def test_while_draining_rows_finish_and_no_shard_is_taken(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 8)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    loop.control.stop(drain_s=NEVER_S)
    backend.finish(0, 1, 2, 3)
    loops.join()
    assert [shard.state for shard in shards_of(database, job)] == ["done", "queued"]
    assert len(answers_of(database, job)) == 4


def test_after_the_drain_time_finished_rows_are_stored_and_the_shard_is_given_back(
    database: Database, settings: Settings
) -> None:
    settings = with_queue(settings, flush_s=NEVER_S, rows_in_flight=4)
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    loops = Loops(loop)
    backend.wait_for_rows(0, 1, 2, 3)
    loop.control.stop(drain_s=NEVER_S)
    backend.finish(3)
    eventually(lambda: loop.rows_in_flight.has_room, "the loop has taken row 3")
    loop.control.stop(drain_s=0)
    loops.join()
    shard = shards_of(database, job)[0]
    assert (shard.state, shard.attempts, shard.lease_owner) == ("queued", 0, None)
    assert answers_of(database, job) == {3: ["answer 3"]}
    assert len(backend.aborted) == 3
    # The next worker runs what is left, and only that.
    heir = ScriptedBackend(answer)
    make_loop(database, settings, heir).run_available()
    assert [sample.token_ids for sample in heir.seen] == [[0], [1], [2]]
    assert job_of(database, job).state == "completed"


def test_the_drain_time_counts_while_rows_are_being_prepared_too(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is tokenised, a grammar compiled: with many rows that takes longer than anyone waits."""
    job = submit(database, settings, 4)
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend)
    prepare = loop.prepare

    def slowly(row: Any, *rest: Any) -> Any:
        if row.row_index == 1:
            loop.control.stop(drain_s=0)
        return prepare(row, *rest)

    monkeypatch.setattr(loop, "prepare", slowly)
    loop.run_available()
    assert [sample.token_ids for sample in backend.seen] == [[0], [1]]
    assert [shard.state for shard in shards_of(database, job)] == ["queued"]
    assert len(backend.aborted) == 2


def test_rows_that_cannot_run_end_with_their_reason_and_the_others_are_answered(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, ["row 0", "long", "refused", "row 3"])
    backend = ScriptedBackend(lambda sample: refuse(sample) if sample.token_ids == [3] else answer(sample))
    make_loop(database, settings, backend).run_available()
    assert rows_of(database, job) == {
        0: ("completed", None),
        1: ("failed", "prompt_too_long"),
        2: ("failed", "template_refused"),
        3: ("failed", "engine_refused"),
    }
    assert [sample.token_ids for sample in backend.seen] == [[0], [3]]
    assert job_of(database, job).state == "completed"
    assert (job_of(database, job).num_completed, job_of(database, job).num_failed) == (1, 3)


def test_each_sample_of_a_row_is_stored_under_its_number(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 2, sampling={"n": 3, "seed": 7})
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend))
    backend.wait_for_rows(0, 1)
    for number in (2, 0, 1):  # they finish in any order
        backend.finish_sample(0, number, lambda s: Finished(s.key, f"sample {s.key[-1]}", "stop", (2,), receipt(1, 1)))
    backend.finish(1)
    loops.join()
    assert answers_of(database, job)[0] == ["sample 0", "sample 1", "sample 2"]
    # Every row has seeds of its own: like prompts must not get like answers.
    assert sorted(sample.seed or 0 for sample in backend.seen) == [7, 8, 9, 10, 11, 12]


def test_one_refused_sample_fails_its_row_once_and_frees_the_others(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 2, sampling={"n": 3})
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend))
    backend.wait_for_rows(0, 1)
    backend.finish_sample(0, 1, answer)
    backend.finish_sample(0, 2, refuse)
    backend.wait_for_rows(1)
    backend.finish(1)
    loops.join()
    assert rows_of(database, job) == {0: ("failed", "engine_refused"), 1: ("completed", None)}
    assert set(answers_of(database, job)) == {1}
    assert [key[-2:] for key in backend.aborted] == ["-0"]


def test_a_dead_engine_ends_the_loops_and_leaves_the_lease_to_the_worker(
    database: Database, settings: Settings
) -> None:
    job = submit(database, settings, 8)
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend), 2)
    backend.wait_for_rows(*range(8))
    backend.finish(0)
    eventually(lambda: 0 in answers_of(database, job), "row 0 is stored")
    backend.die()
    loops.join()
    assert [shard.state for shard in shards_of(database, job)] == ["leased", "leased"]
    assert leases.release_all(database, OWNER, crashed=True) == 2
    heir = ScriptedBackend(answer)
    make_loop(database, settings, heir).run_available()
    assert sorted(sample.token_ids[0] for sample in heir.seen) == list(range(1, 8))
    assert job_of(database, job).state == "completed"
    assert [shard.attempts for shard in shards_of(database, job)] == [1, 1]


def test_an_engine_that_died_before_the_rows_came_runs_nothing(database: Database, settings: Settings) -> None:
    job = submit(database, settings, 4)

    class DiesMeanwhile(ScriptedBackend):
        def submit(self, samples: Any, done: Any) -> None:
            self.die()
            super().submit(samples, done)

    loop = make_loop(database, settings, DiesMeanwhile())
    loop.run_available()
    assert answers_of(database, job) == {}
    assert loop.rows_in_flight.wait_for_room(0)
