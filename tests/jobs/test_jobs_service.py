"""What can be asked about jobs, with exactly the keys of the contract."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from batches import (
    MODEL,
    acquire,
    answered,
    drafted,
    drain,
    failed,
    run_shard,
    sample,
    submit_rows,
    submit_table,
)
from sqlalchemy import insert, literal, select, text

from db.clock import db_now
from db.models import Worker
from db.session import Database
from jobs import results, service
from jobs.ending import cancel, fail_job, retry
from jobs.errors import BadInput, NotFound
from jobs.settings import Settings

STATUS_KEYS = [
    "job_id", "name", "state", "model", "decoding", "counts", "created_at", "started_at", "finished_at", "eta_s",
    "output_tokens", "error",
]  # fmt: skip


NO_WORKER = f"no worker serves {MODEL} now: start one with `forq worker --model {MODEL}`"


def test_a_status_has_exactly_the_contracts_keys(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 6, name="my job")
    status = service.job_status(database, job_id)
    assert list(status) == STATUS_KEYS
    assert status["counts"] == {"total": 6, "completed": 0, "failed": 0, "cancelled": 0}
    assert {key: status[key] for key in STATUS_KEYS if key not in ("counts", "created_at")} == {
        "job_id": job_id, "name": "my job", "state": "queued", "model": MODEL, "decoding": "ar", "started_at": None,
        "finished_at": None, "eta_s": None, "output_tokens": 0, "error": NO_WORKER,
    }  # fmt: skip


def test_a_status_follows_the_job_to_its_end(database: Database, settings: Settings) -> None:
    job_id = submit_table(database, settings, {"prompt": ["a", None, "c", "d", "e", "f"]}).job_id
    assert service.job_status(database, job_id)["counts"]["failed"] == 1
    run_shard(database, acquire(database), lambda row: failed(row) if row.row_index == 2 else answered(row))
    running = service.job_status(database, job_id)
    assert running["state"] == "running"
    assert running["counts"] == {"total": 6, "completed": 2, "failed": 2, "cancelled": 0}
    assert running["output_tokens"] == 4
    assert running["eta_s"] >= 0
    drain(database)
    ended = service.job_status(database, job_id)
    assert ended["state"] == "completed"
    assert ended["counts"] == {"total": 6, "completed": 4, "failed": 2, "cancelled": 0}
    assert (ended["output_tokens"], ended["eta_s"]) == (8, None)
    created, started, finished = (
        datetime.fromisoformat(ended[key]) for key in ("created_at", "started_at", "finished_at")
    )
    assert all(ended[key].endswith("Z") for key in ("created_at", "started_at", "finished_at"))
    assert created <= started <= finished < created + timedelta(minutes=5)


def test_the_remaining_time_is_worked_out_from_the_pace(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 16)
    run_shard(database, acquire(database))
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET started_at = :at"), {"at": _ago(database, 40)})
    assert service.job_status(database, job_id)["eta_s"] == pytest.approx(120, abs=15)


def _ago(database: Database, seconds: float) -> Any:
    with database.read() as connection:
        moment = connection.execute(select(db_now(literal(-seconds)))).scalar_one()
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f") if database.is_sqlite else moment


def test_counts_of_cancelled_failed_and_retried_jobs_add_up(database: Database, settings: Settings) -> None:
    cancelled = submit_rows(database, settings, 8)
    run_shard(database, acquire(database))
    cancel(database, cancelled)
    assert service.job_status(database, cancelled)["counts"] == {
        "total": 8, "completed": 4, "failed": 0, "cancelled": 4
    }  # fmt: skip
    broken = submit_rows(database, settings, 8)
    fail_job(database, broken, "the model cannot be loaded")
    status = service.job_status(database, broken)
    assert (status["state"], status["error"]) == ("failed", "the model cannot be loaded")
    assert status["counts"]["failed"] == 8
    retry(database, broken)
    status = service.job_status(database, broken)
    assert (status["state"], status["error"], status["finished_at"]) == ("queued", NO_WORKER, None)
    assert status["counts"] == {"total": 8, "completed": 0, "failed": 0, "cancelled": 0}


def test_jobs_are_listed_newest_first_and_by_page(database: Database, settings: Settings) -> None:
    job_ids = [submit_rows(database, settings, 5) for _ in range(5)]
    run_shard(database, acquire(database))
    cancel(database, job_ids[3])
    newest = sorted(job_ids, reverse=True)
    listed = service.list_jobs(database)
    assert [job["job_id"] for job in listed] == newest
    told = [service.job_status(database, job_id) for job_id in newest]
    # One answer, two ways; but time goes on between them.
    assert [{**job, "eta_s": None} for job in listed] == [{**job, "eta_s": None} for job in told]
    page = service.list_jobs(database, limit=2)
    assert [job["job_id"] for job in page] == newest[:2]
    page = service.list_jobs(database, limit=2, before=page[-1]["job_id"])
    assert [job["job_id"] for job in page] == newest[2:4]
    assert [job["job_id"] for job in service.list_jobs(database, state="cancelled")] == [job_ids[3]]
    assert service.list_jobs(database, state="failed") == []
    assert service.list_jobs(database, before="0") == []
    service.list_jobs(database, before="a\x00b")


def test_a_list_refuses_what_does_not_exist(database: Database) -> None:
    for limit in (0, -1, 1001):
        with pytest.raises(BadInput, match=f"limit is {limit}: it must be between 1 and 1000"):
            service.list_jobs(database, limit=limit)
    with pytest.raises(BadInput, match="state is 'done': use one of queued, running"):
        service.list_jobs(database, state="done")


def test_an_unknown_job_or_row_is_not_found(database: Database, settings: Settings) -> None:
    for job_id in ("none", "", "a\x00b", "x" * 10_000):
        for ask in (service.job_status, service.job_stats, service.job_detail):
            with pytest.raises(NotFound, match="no job"):
                ask(database, job_id)
        with pytest.raises(NotFound, match="no job"):
            service.request_detail(database, job_id, 0)
    job_id = submit_rows(database, settings, 3)
    for row in (-1, 3, 2**31, 2**63, 10**30):
        with pytest.raises(NotFound, match=f"no row {row}: its rows are 0 to 2"):
            service.request_detail(database, job_id, row)


def test_a_rows_detail_has_its_samples_trees_and_statistics(database: Database, settings: Settings) -> None:
    columns = {"prompt": ["a", None, "c"], "key": [10, 11, 12]}
    job_id = submit_table(database, settings, columns, id_column="key").job_id

    def answer(row: results.PendingRow) -> results.RowResult:
        return results.RowResult(row.request_id, (sample("first"), sample("second", num_nodes=3)))

    waiting = service.request_detail(database, job_id, 0)
    assert waiting == {
        "job_id": job_id, "row": 0, "id": "10", "state": "queued", "error_code": None, "error": None, "samples": []
    }  # fmt: skip
    drain(database, answer)
    detail = service.request_detail(database, job_id, 2)
    assert (detail["row"], detail["id"], detail["state"]) == (2, "12", "completed")
    assert [item["output"] for item in detail["samples"]] == ["first", "second"]
    second = detail["samples"][1]
    assert list(second) == [
        "sample", "output", "turns", "finish_reason", "prompt_tokens", "output_tokens", "stats", "tree"
    ]  # fmt: skip
    assert second["turns"] == []
    assert second["stats"]["threads"] == 3
    assert "request_id" not in second["stats"]
    assert [(node["node"], node["parent"], node["kind"], node["text"]) for node in second["tree"]] == [
        (0, None, "root", "s"), (1, 0, "detail", "e"), (2, 1, "sibling", "cond")
    ]  # fmt: skip
    assert [(node["text_start"], node["text_end"]) for node in second["tree"]] == [(0, 1), (1, 2), (2, 6)]
    refused = service.request_detail(database, job_id, 1)
    assert (refused["state"], refused["error_code"], refused["samples"]) == ("failed", "empty_prompt", [])


def test_a_jobs_statistics_are_the_sums_over_its_samples(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 5, sampling={"n": 2})
    other = submit_rows(database, settings, 3)
    empty = service.job_stats(database, job_id)
    assert (empty["num_samples"], empty["peak_ratio"], empty["steps_saved_percent"]) == (0, None, None)
    assert (empty["mean_threads"], empty["forked_share"], empty["max_threads"]) == (None, None, 0)
    drain(
        database,
        lambda row: results.RowResult(
            row.request_id, tuple(sample("x", output_tokens=row.row_index + 1, num_nodes=n + 1) for n in range(2))
        ),
    )
    stats = service.job_stats(database, job_id)
    tokens = 2 * (1 + 2 + 3 + 4 + 5)
    assert stats == {
        "job_id": job_id, "state": "completed", "decoding": "ar",
        "counts": {"total": 5, "completed": 5, "failed": 0, "cancelled": 0},
        "cached_prompt_tokens": 0, "prefix_cache_hit_rate": None,
        "num_samples": 10, "prompt_tokens": 30, "output_tokens": tokens, "max_width": 2, "threads": 15, "forks": 5,
        "max_threads": 2, "forked_samples": 5, "mean_threads": 1.5, "forked_share": 0.5,
        "steps": tokens, "peak_cached_tokens": 30 + tokens, "peak_blocks": 10, "attended_tokens": 100,
        "sequential_peak_tokens": 30 + tokens, "sequential_attended_tokens": 200, "preemptions": 0,
        "sequential_steps": tokens, "peak_ratio": 1.0, "attended_ratio": 0.5, "steps_ratio": 1.0,
        "peak_saved_percent": 0.0, "attended_saved_percent": 50.0, "steps_saved_percent": 0.0,
        "forwards": None, "draft_nodes": None, "verify_nodes": None,
        "mean_hit_rate": None, "mean_acceptance_length": None, "mean_decoding_efficiency": None,
    }  # fmt: skip
    assert service.job_stats(database, other)["num_samples"] == 6


def test_a_decoders_figures_are_summed_and_averaged_over_the_samples_that_have_them(
    database: Database, settings: Settings
) -> None:
    job_id = submit_rows(database, settings, 3)

    def answer(row: results.PendingRow) -> results.RowResult:
        number = row.row_index
        return drafted(row, forwards=number, hit_rate=0.25 * number) if number else answered(row)

    drain(database, answer)
    stats = service.job_stats(database, job_id)
    assert stats["num_samples"] == 3
    assert (stats["forwards"], stats["draft_nodes"], stats["verify_nodes"]) == (3, 80, 34)
    means = [stats[f"mean_{name}"] for name in ("hit_rate", "acceptance_length", "decoding_efficiency")]
    assert means == [0.375, 2.3333, 2.0]
    (first,), (second,) = (service.request_detail(database, job_id, row)["samples"] for row in (0, 1))
    assert {first["stats"][name] for name in ("forwards", "hit_rate", "verify_nodes")} == {None}
    assert (second["stats"]["forwards"], second["stats"]["hit_rate"], second["stats"]["verify_nodes"]) == (1, 0.25, 17)


def add_worker(database: Database, number: int, *, silent_s: float = 0, **values: Any) -> None:
    with database.write() as connection:
        connection.execute(
            insert(Worker).values(
                **{
                    "id": str(number) * 26,
                    "model": MODEL,
                    "host": "here",
                    "pid": number,
                    "state": "ready",
                    "engine": {"block_size": 16},
                    "started_at": db_now(literal(-100.0 + number)),
                    "heartbeat_at": db_now(literal(-silent_s)),
                    **values,
                }
            )
        )


def test_workers_are_listed_while_they_are_alive(database: Database) -> None:
    add_worker(database, 1)
    add_worker(database, 2, silent_s=service.WORKER_ALIVE_S + 5)
    add_worker(database, 3, state="exited", exited_at=db_now(), exit_reason="drained")
    add_worker(database, 4)
    alive = service.workers(database)
    assert [worker["pid"] for worker in alive] == [4, 1]
    assert alive[0]["engine"] == {"block_size": 16}
    assert alive[0]["started_at"].endswith("Z")
    assert [worker["pid"] for worker in service.workers(database, alive_only=False)] == [4, 3, 2, 1]


def test_a_job_that_stands_still_says_why(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 3)
    assert service.job_status(database, job_id)["error"] == NO_WORKER
    add_worker(database, 1, silent_s=10, state="exited", exited_at=db_now(), exit_reason="out of memory")
    assert service.job_status(database, job_id)["error"] == f"{NO_WORKER}; the last one ended with: out of memory"
    add_worker(database, 2)
    assert service.job_status(database, job_id)["error"] is None


def test_an_answer_without_a_receipt_is_an_answer_all_the_same(database: Database, settings: Settings) -> None:
    job_id = submit_rows(database, settings, 1)
    bare = results.SampleResult("text", "stop", 3, 2, None, ())
    drain(database, lambda row: results.RowResult(row.request_id, (bare,)))
    (found,) = service.request_detail(database, job_id, 0)["samples"]
    assert (found["output"], found["stats"], found["tree"]) == ("text", None, [])
    assert service.job_stats(database, job_id)["num_samples"] == 0
