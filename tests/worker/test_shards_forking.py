"""Forked answers and shares of the KV budget in the shard loop: what the engine is told, and what is stored."""

from pathlib import Path

import pytest
from scripted import (
    Loops,
    ScriptedBackend,
    answer,
    eventually,
    job_of,
    make_loop,
    receipt,
    submit,
    with_queue,
)

from db.session import Database
from jobs import ending, service
from jobs.reference_settings import ReferenceSettings
from jobs.settings import DEFAULT_MODEL, ModelAlias, Settings
from worker.backend import Decoding, Finished, Sample


def forked(sample: Sample) -> Finished:
    """Two threads: "one: detail two"."""
    nodes = [[0, None, "root", 0, 0, 1, 0, 0], [1, 0, "detail", 1, 1, 2, 2, 2], [2, 0, "sibling", 0, 2, 4, 1, 2]]
    return Finished(sample.key, "one: detail two", "stop", (5, 6, 7, 2), receipt(1, 4, nodes, steps=3))


FORKING = ModelAlias(fork_token="[Fork]", child_token="[Child]")


def with_model(settings: Settings, **aliases: ModelAlias) -> Settings:
    return settings.model_copy(update={"models": {**settings.models, **aliases}})


def test_a_forked_answer_is_stored_with_its_tree_and_each_nodes_text(database: Database, settings: Settings) -> None:
    settings = with_model(settings, **{DEFAULT_MODEL: FORKING})
    job = submit(database, settings, 1, decoding="apar")
    backend = ScriptedBackend(forked, can_fork=True)
    make_loop(database, settings, backend).run_available()
    assert [sample.decoding for sample in backend.seen] == [Decoding("apar", job_id=job)]
    detail = service.request_detail(database, job, 0)
    (sample,) = detail["samples"]
    assert (sample["stats"]["threads"], sample["stats"]["forks"], sample["stats"]["steps"]) == (2, 1, 3)
    assert [(n["kind"], n["thread"], n["text"]) for n in sample["tree"]] == [
        ("root", 0, "one"), ("detail", 1, ":"), ("sibling", 0, " detail two")
    ]  # fmt: skip
    assert "".join(n["text"] for n in sample["tree"]) == sample["output"]


def test_a_job_that_says_ar_never_forks_whatever_the_model_can(database: Database, settings: Settings) -> None:
    settings = with_model(settings, **{DEFAULT_MODEL: FORKING})
    job = submit(database, settings, 2)
    backend = ScriptedBackend(answer, can_fork=True)
    make_loop(database, settings, backend).run_available()
    assert {sample.decoding for sample in backend.seen} == {Decoding(job_id=job)}


def test_a_worker_whose_model_cannot_fork_fails_a_job_that_must_with_the_remedy(
    database: Database, settings: Settings
) -> None:
    job = submit(database, with_model(settings, **{DEFAULT_MODEL: FORKING}), 6, decoding="apar")
    backend = ScriptedBackend(answer)
    loop = make_loop(database, settings, backend)
    loop.run_available()
    assert backend.seen == []
    found = job_of(database, job)
    assert (found.state, found.num_failed) == ("failed", 6)
    assert "has no control tokens: name fork_token and child_token in [models.smollm2-135m]" in found.error
    assert loop.rows_in_flight.has_room
    assert ending.retry(database, job) == 6
    make_loop(database, settings, ScriptedBackend(forked, can_fork=True)).run_available()
    assert job_of(database, job).state == "completed"


REFERENCE = ModelAlias(
    fork_token="[Fork]", child_token="[Child]", backend="reference", reference=ReferenceSettings(medusa=Path("heads"))
)


@pytest.mark.parametrize(
    ("decoding", "can_fork", "decodings", "says"),
    [
        ("ptd", True, ("apar", "ar"), "runs model 'smollm2-135m' on scripted, which has apar, ar: say backend ="),
        ("apar+lade", True, ("apar", "ar"), 'say backend = "reference" in [models.smollm2-135m] of the worker\'s'),
        ("apar+ptd", False, ("ar", "ptd"), "has no control tokens: name fork_token and child_token"),
        ("medusa", True, ("ar", "ptd"), "has no Medusa heads: name their folder as medusa in [models.smollm2-135m.ref"),
    ],
)
def test_a_worker_that_cannot_decode_like_this_fails_the_job_with_the_remedy(
    database: Database, settings: Settings, decoding: str, can_fork: bool, decodings: tuple[str, ...], says: str
) -> None:
    """The worker's configuration may be another than that of who submitted."""
    job = submit(database, with_model(settings, **{DEFAULT_MODEL: REFERENCE}), 5, decoding=decoding)
    backend = ScriptedBackend(answer, can_fork=can_fork, decodings=decodings)
    make_loop(database, settings, backend).run_available()
    assert backend.seen == []
    found = job_of(database, job)
    assert (found.state, found.num_failed) == ("failed", 5)
    assert found.error.startswith(f"decoding is {decoding}, but the worker")
    assert says in found.error


def test_a_jobs_decoding_goes_to_an_engine_that_has_it(database: Database, settings: Settings) -> None:
    job = submit(database, with_model(settings, **{DEFAULT_MODEL: REFERENCE}), 2, decoding="apar+medusa")
    backend = ScriptedBackend(answer, can_fork=True, decodings=("ar", "apar+medusa"))
    make_loop(database, settings, backend).run_available()
    assert {sample.decoding for sample in backend.seen} == {Decoding("apar+medusa", job_id=job)}
    assert job_of(database, job).state == "completed"


def test_a_jobs_share_goes_to_the_engine_with_its_id(database: Database, settings: Settings) -> None:
    shared = submit(database, settings, 1, kv_share=0.25)
    plain = submit(database, settings, 1)
    backend = ScriptedBackend(answer)
    make_loop(database, settings, backend).run_available()
    assert {s.decoding for s in backend.seen} == {Decoding("ar", shared, 0.25, shared), Decoding(job_id=plain)}


def test_a_job_takes_its_share_of_the_rows_in_flight_while_another_waits(
    database: Database, settings: Settings
) -> None:
    first = submit(database, settings, [f"row {n}" for n in range(16)], kv_share=0.5)
    second = submit(database, settings, [f"row {n}" for n in range(100, 108)])
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, with_queue(settings, rows_in_flight=16), backend), 6)
    # Half of the 16 places are the first job's, though all its rows are older.
    backend.wait_for_rows(*range(8), *range(100, 108))
    backend.finish(*range(100, 108))
    eventually(lambda: job_of(database, second).state == "completed", "the second job ends")
    # Nobody waits any more: the first job may have all the places.
    backend.wait_for_rows(*range(16))
    backend.finish(*range(16))
    loops.join()
    assert job_of(database, first).state == "completed"
