"""What batches are made of: which files are refused, with which lines, and what the others bring."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_support import finish_shard
from batch_desk import Desk, check_sums
from database_fixtures import BACKENDS
from openai_support import CHAT, COMPLETIONS, line, lines, many
from sqlalchemy import select

from db.models import Job
from jobs import openai_files
from jobs.settings import DEFAULT_MODEL

pytestmark = pytest.mark.parametrize("settings", BACKENDS, indirect=True)


def refused(desk: Desk, content: bytes, name: str = "batch.jsonl", **asked: Any) -> list[dict[str, Any]]:
    batch_id = desk.create(content, name, **asked)
    desk.step()
    batch = desk.see(batch_id)
    assert batch["status"] == "failed", batch
    assert batch["failed_at"] is not None
    assert desk.count(Job) == 0
    found: list[dict[str, Any]] = batch["errors"]["data"]
    assert all(each.keys() == {"code", "line", "message", "param"} for each in found)
    return found


GOOD = line("good")


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (lines(GOOD, "{oops", GOOD), [("invalid_json_line", 2), ("duplicate_custom_id", 3)]),
        (lines("[1]"), [("invalid_json_line", 1)]),
        (lines("", GOOD, "", line("x", model="gpt-9")), [("model_not_found", 4)]),
        (lines(GOOD, line("x", "/v1/embeddings")), [("invalid_url", 2)]),
        (lines(GOOD, line("x", COMPLETIONS)), [("invalid_url", 2)]),
        (lines(GOOD, line("x", model="secret")), [("mismatched_model", 2)]),
        (lines({**GOOD, "method": "GET"}), [("invalid_method", 1)]),
        (lines({"url": CHAT, "body": {}}), [("missing_required_parameter", 1)]),
        (lines({"custom_id": "a", "body": {}}), [("missing_required_parameter", 1)]),
        (lines({"custom_id": "a", "url": CHAT, "body": []}), [("missing_required_parameter", 1)]),
        (lines({"custom_id": "", "url": CHAT, "body": {}}), [("missing_required_parameter", 1)]),
        (lines('{"custom_id": "\\ud800", "url": "/v1/chat/completions", "body": {}}'), [("invalid_json_line", 1)]),
        (lines(line("a", forq={"decoding": "apar"}), line("b")), [("mismatched_decoding", 2)]),
        (lines(line("a", forq={"decoding": "warp"})), [("invalid_file", None)]),
        (b"", [("empty_file", None)]),
        (b"\n \n", [("empty_file", None)]),
        (b"\xff\xfe", [("invalid_json_line", 1)]),
    ],
)
def test_a_refused_file_says_which_lines(desk: Desk, content: bytes, faults: list[tuple[str, int | None]]) -> None:
    found = refused(desk, content)
    assert [(each["code"], each["line"]) for each in found] == faults
    assert all(each["message"] and "\n" not in each["message"] for each in found)


def test_a_file_over_the_limits_is_refused(desk: Desk) -> None:
    small = desk.settings.batches.model_copy(update={"max_lines": 2, "max_file_bytes": 1000})
    desk.settings = desk.settings.model_copy(update={"batches": small})
    assert refused(desk, many(3))[0]["code"] == "too_many_tasks"
    assert refused(desk, many(100))[0]["code"] == "file_too_large"
    few = refused(desk, lines(*["oops"] * 2, GOOD))
    assert [each["code"] for each in few] == ["invalid_json_line"] * 2 + ["too_many_tasks"]


def test_of_many_faults_a_hundred_are_told(desk: Desk) -> None:
    assert len(refused(desk, lines(*["oops"] * 300))) == 100


def test_a_damaged_parquet_file_is_refused_under_its_own_name(desk: Desk) -> None:
    (fault,) = refused(desk, b"PAR1 is not enough", "prompts.parquet")
    assert fault["code"] == "invalid_file"
    assert "prompts.parquet" in fault["message"]


def test_parquet_is_answered_with_ids_of_its_column_or_its_rows(desk: Desk) -> None:
    def run(table: pa.Table, **asked: Any) -> list[str]:
        sink = io.BytesIO()
        pq.write_table(table, sink)
        batch_id = desk.create(sink.getvalue(), "prompts.parquet", **asked)
        desk.step()
        finish_shard(desk.database)
        desk.end(batch_id, "completed")
        answers, errors = desk.outputs(batch_id)
        return [each["custom_id"] for each in answers + errors]

    texts = ["one", "two", "three"]
    assert run(pa.table({"prompt": texts})) == ["row-0", "row-1", "row-2"]
    assert run(pa.table({"prompt": texts, "custom_id": ["a", "b", "c"]})) == ["a", "b", "c"]
    asked = {"prompt_column": "text", "id_column": "key", "priority": 3, "sampling": {"max_tokens": 7}}
    assert run(pa.table({"text": texts, "key": [5, 6, 7]}), model=DEFAULT_MODEL, options=asked) == ["5", "6", "7"]
    with desk.database.read() as connection:
        job = connection.execute(select(Job.__table__).order_by(Job.id.desc()).limit(1)).one()
    assert (job.priority, job.sampling, job.source) == (3, {"max_tokens": 7}, "api")


def test_lines_choose_forking_for_their_batch(desk: Desk) -> None:
    body = {"model": "smollm2-135m-apar", "forq": {"decoding": "apar"}}
    batch_id = desk.create(many(2, **body))
    desk.step()
    assert desk.see(batch_id)["model"] == "smollm2-135m-apar"
    with desk.database.read() as connection:
        assert connection.execute(select(Job.decoding)).scalar_one() == "apar"
    finish_shard(desk.database, model="smollm2-135m-apar")
    desk.end(batch_id, "completed")
    answers, errors = desk.outputs(batch_id)
    assert (len(answers), errors) == (2, [])
    assert answers[0]["response"]["body"]["forq"]["decoding"] == "apar"


def test_a_batch_chooses_forking_for_lines_that_do_not_say(desk: Desk) -> None:
    batch_id = desk.create(many(1), model="smollm2-135m-apar", options={"decoding": "apar"})
    desk.step()
    with desk.database.read() as connection:
        assert connection.execute(select(Job.decoding, Job.model)).one() == ("apar", "smollm2-135m-apar")
    assert desk.state(batch_id) == "in_progress"


def test_completions_come_back_as_completions(desk: Desk) -> None:
    batch_id = desk.create(lines(line("a", COMPLETIONS, n=1)), endpoint=COMPLETIONS)
    desk.step()
    finish_shard(desk.database)
    desk.end(batch_id, "completed")
    body = desk.outputs(batch_id)[0][0]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "an answer"


def test_an_input_that_is_deleted_while_its_batch_runs_is_not_missed(desk: Desk) -> None:
    batch_id = desk.create(many(2))
    openai_files.delete_file(desk.database, desk.see(batch_id)["input_file_id"], None)
    desk.step()
    finish_shard(desk.database)
    desk.end(batch_id, "completed")
    check_sums(desk, batch_id, 2)
