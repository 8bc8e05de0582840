"""Rows of several turns in the shard loop: each sample asks its next question when its answer is there."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import (
    Loops,
    NumberEncoder,
    ScriptedBackend,
    eventually,
    job_of,
    make_loop,
    receipt,
    rows_of,
    shards_of,
    with_queue,
)
from test_shards import beat, steal

from db.session import Database
from jobs import ending, leases
from jobs.service import request_detail
from jobs.settings import DEFAULT_MODEL, Settings
from jobs.submit import SubmitOptions, submit_file
from worker.backend import Finished, Refused, Sample
from worker.prompts import PromptError


class TurnEncoder(NumberEncoder):
    """Encodes a conversation as [its row, 100 + its number of messages], and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[dict[str, str]]] = []

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.seen.append(messages)
        if messages[-1]["content"] == "refused":
            raise PromptError("template_refused", "the template refuses it")
        row = int(messages[0]["content"].split()[1])
        if messages[-1]["content"] == "long":
            return [row] * 100
        return [row, 100 + len(messages)]


def said(sample: Sample) -> Finished:
    """Tells of the row, the turn and the sample's key."""
    text = f"<{sample.key.rsplit('-', 1)[1]}>"
    return Finished(sample.key, text, "stop", (5, 6, 2), receipt(len(sample.token_ids), 3))


def submit_turns(database: Database, settings: Settings, num_rows: int, *turns: str, **options: Any) -> str:
    settings.home.mkdir(parents=True, exist_ok=True)
    path = settings.home / "input.parquet"
    pq.write_table(pa.table({"prompt": [f"row {n}" for n in range(num_rows)]}), path)
    turned = SubmitOptions(**{"model": DEFAULT_MODEL, "turn": turns, **options})
    return submit_file(database, settings, path, turned).job_id


def test_each_sample_walks_through_its_own_turns(database: Database, settings: Settings) -> None:
    job = submit_turns(
        database, settings, 3, "more {{ prompt }}", "{{ answers[0] }} and {{ answers[1] }}", sampling={"n": 2}
    )
    encoder, backend = TurnEncoder(), ScriptedBackend(said)
    make_loop(database, settings, backend, encoder).run_available()
    assert job_of(database, job).state == "completed"
    assert len(backend.seen) == 3 * 2 * 3
    detail = request_detail(database, job, 1)
    assert [sample["output"] for sample in detail["samples"]] == ["<0~2>", "<1~2>"]
    assert detail["samples"][1]["turns"] == [
        {"content": "<1>", "finish_reason": "stop", "prompt_tokens": 2, "output_tokens": 3},
        {"content": "<1~1>", "finish_reason": "stop", "prompt_tokens": 2, "output_tokens": 3},
    ]
    last = [messages for messages in encoder.seen if len(messages) == 5 and messages[0]["content"] == "row 1"]
    assert [[message["content"] for message in messages] for messages in last] == [
        ["row 1", f"<{n}>", "more row 1", f"<{n}~1>", f"<{n}> and <{n}~1>"] for n in (0, 1)
    ]
    assert [message["role"] for message in last[0]] == ["user", "assistant", "user", "assistant", "user"]


def test_the_seeds_of_turns_samples_and_rows_are_all_different_and_the_same_in_every_run(
    database: Database, settings: Settings
) -> None:
    runs = []
    for _ in range(2):
        submit_turns(database, settings, 4, "a", "b", sampling={"n": 3, "seed": 11})
        backend = ScriptedBackend(said)
        make_loop(database, settings, backend, TurnEncoder()).run_available()
        runs.append([sample.seed for sample in backend.seen])
        assert all(seed is not None and 0 <= seed < 1 << 63 for seed in runs[-1])
    assert runs[0] == runs[1]
    assert len({*runs[0]}) == 4 * 3 * 3


def test_a_row_is_written_when_all_its_turns_are_done_and_not_before(database: Database, settings: Settings) -> None:
    job = submit_turns(database, settings, 2, "more")
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend, TurnEncoder()))
    backend.wait_for_rows(0, 1)
    backend.finish(0)
    eventually(lambda: [s.key for s in backend.seen if s.key.endswith("~1")], "row 0 asks its second question")
    assert rows_of(database, job)[0] == ("queued", None)
    backend.finish(0)
    eventually(lambda: rows_of(database, job)[0] == ("completed", None), "row 0 is stored")
    assert rows_of(database, job)[1] == ("queued", None)
    backend.finish(1)
    eventually(lambda: sum(s.key.endswith("~1") for s in backend.seen) == 2, "row 1 asks its second question")
    backend.finish(1)
    loops.join()
    assert job_of(database, job).state == "completed"
    assert shards_of(database, job)[0].output_tokens == 6


@pytest.mark.parametrize(
    ("turn", "code", "message"),
    [
        ("long", "prompt_too_long", "turn 3 of 3, after 2 answer(s): the prompt has 100 tokens, at most 63 leave room"),
        ("refused", "template_refused", "turn 3 of 3: the template refuses it"),
    ],
)
def test_a_turn_that_cannot_be_asked_ends_its_row_with_the_turn_named(
    database: Database, settings: Settings, turn: str, code: str, message: str
) -> None:
    job = submit_turns(database, settings, 2, "more", turn, sampling={"n": 2})
    backend = ScriptedBackend(said)
    make_loop(database, settings, backend, TurnEncoder()).run_available()
    assert rows_of(database, job) == {0: ("failed", code), 1: ("failed", code)}
    assert message in request_detail(database, job, 0)["error"]
    assert backend.rows == []


def test_a_refused_turn_takes_the_other_samples_of_its_row_out_of_the_engine(
    database: Database, settings: Settings
) -> None:
    job = submit_turns(database, settings, 1, "more", sampling={"n": 3})
    backend = ScriptedBackend(lambda sample: Refused(sample.key, "no") if sample.key.endswith("-1~1") else None)
    loops = Loops(make_loop(database, settings, backend, TurnEncoder()))
    backend.wait_for_rows(0)
    backend.finish_sample(0, 0, said)
    eventually(lambda: any(s.key.endswith("-0~1") for s in backend.seen), "sample 0 asks again")
    backend.finish_sample(0, 1, said)
    loops.join()
    assert rows_of(database, job) == {0: ("failed", "engine_refused")}
    assert sorted(key.rsplit("-", 1)[1] for key in backend.aborted) == ["0~1", "2"]


def test_cancelling_between_two_turns_takes_the_later_one_out(database: Database, settings: Settings) -> None:
    job = submit_turns(database, with_queue(settings, flush_s=1000.0), 1, "more")
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend, TurnEncoder())
    loops = Loops(loop)
    backend.wait_for_rows(0)
    backend.finish(0)
    eventually(lambda: len(backend.seen) == 2, "the second turn is asked")
    ending.cancel(database, job)
    beat(database, settings, loop)
    loops.join()
    assert job_of(database, job).state == "cancelled"
    assert rows_of(database, job) == {0: ("cancelled", None)}
    assert [key.rsplit("-", 1)[1] for key in backend.aborted] == ["0~1"]


def test_a_row_that_was_lost_between_two_turns_is_asked_again_from_the_first(
    database: Database, settings: Settings
) -> None:
    job = submit_turns(database, settings, 1, "more", sampling={"seed": 3})
    backend = ScriptedBackend()
    loop = make_loop(database, settings, backend, TurnEncoder())
    loops = Loops(loop)
    backend.wait_for_rows(0)
    backend.finish(0)
    eventually(lambda: len(backend.seen) == 2, "the second turn is asked")
    stolen = steal(database, settings)
    beat(database, settings, loop)
    loops.join()
    assert rows_of(database, job) == {0: ("queued", None)}
    leases.release(database, stolen)
    again = ScriptedBackend(said)
    make_loop(database, settings, again, TurnEncoder()).run_available()
    assert [(s.token_ids, s.seed) for s in again.seen] == [(s.token_ids, s.seed) for s in backend.seen]
    assert rows_of(database, job) == {0: ("completed", None)}


def test_turns_of_many_rows_are_in_the_engine_together(database: Database, settings: Settings) -> None:
    job = submit_turns(database, settings, 8, "more", "and more")
    backend = ScriptedBackend()
    loops = Loops(make_loop(database, settings, backend, TurnEncoder()), 2)
    for _ in range(3):
        backend.wait_for_rows(*range(8))
        backend.finish(*range(8))
    loops.join()
    assert job_of(database, job).num_completed == 8
