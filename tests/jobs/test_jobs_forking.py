"""Decoding and share of the KV budget: who may ask for them, where they are kept, and who is leased first."""

from typing import Any

import pytest
from batches import MODEL, OWNER, acquire, submit_rows
from sqlalchemy import select

from db.models import Job
from db.session import Database
from jobs import leases, results
from jobs.errors import BadInput
from jobs.settings import Settings


def job_row(database: Database, job_id: str) -> Any:
    with database.read() as connection:
        return connection.execute(select(Job.decoding, Job.kv_share).where(Job.id == job_id)).one()


def test_decoding_and_share_are_stored_and_reach_whoever_leases(database: Database, settings: Settings) -> None:
    forked = submit_rows(database, settings, 2, model="forking", decoding="apar", kv_share=0.25)
    assert tuple(job_row(database, forked)) == ("apar", 0.25)
    lease = acquire(database, model="forking")
    assert lease.kv_share == 0.25
    work = results.load(database, lease)
    assert (work.decoding, work.kv_share) == ("apar", 0.25)
    plain = submit_rows(database, settings, 2)
    assert tuple(job_row(database, plain)) == ("ar", None)
    lease = acquire(database)
    assert lease.kv_share == 1.0
    assert results.load(database, lease).kv_share is None


def test_the_whole_budget_is_a_share_too(database: Database, settings: Settings) -> None:
    assert job_row(database, submit_rows(database, settings, 1, kv_share=1)).kv_share == 1.0


def test_a_model_folder_that_is_here_may_say_itself_that_it_forks(database: Database, settings: Settings) -> None:
    settings.home.mkdir(exist_ok=True)
    config = settings.home / "config.json"  # "other" has its files there
    for content in ("{}", "not json", "[]", '{"apar": null}', '{"apar": 3}'):
        config.write_text(content)
        with pytest.raises(BadInput, match="not known to fork"):
            submit_rows(database, settings, 1, model="other", decoding="apar")
    config.write_text('{"apar": {"fork_token_id": 5, "child_token_id": 6}}')
    assert job_row(database, submit_rows(database, settings, 1, model="other", decoding="apar")).decoding == "apar"


def test_the_models_cache_may_say_it_too(database: Database, settings: Settings) -> None:
    cache = settings.home / "models" / MODEL
    cache.mkdir(parents=True)
    (cache / "config.json").write_text('{"apar": {"fork_token_id": 5, "child_token_id": 6}}')
    assert job_row(database, submit_rows(database, settings, 1, decoding="apar")).decoding == "apar"


def test_another_share_is_another_job_of_a_dropped_file(database: Database, settings: Settings) -> None:
    jobs = {submit_rows(database, settings, 1, dedupe=True, kv_share=share) for share in (None, 0.5, 0.5, 1.0)}
    assert len(jobs) == 3


def test_shards_of_jobs_that_have_their_share_are_passed_over(database: Database, settings: Settings) -> None:
    first = submit_rows(database, settings, 8)
    second = submit_rows(database, settings, 4)
    lease = leases.acquire(database, MODEL, OWNER, 60.0, passing_over=[first])
    assert lease is not None
    assert lease.job_id == second
    assert leases.acquire(database, MODEL, OWNER, 60.0, passing_over=[first]) is None
    assert acquire(database).job_id == first
