"""The Python client against the real server process; answers are written as a worker writes them."""

import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_support import MODEL, UNKNOWN_JOB, batch_lines, finish_shard, prompts
from server_process import Server

from api.forms import SubmitForm
from db.session import Database
from jobs.client import (
    Client,
    ConflictError,
    JobStatus,
    NotFoundError,
    RefusedError,
    StillRunningError,
)
from jobs.client.options import SubmitOptions, form_of
from jobs.client.tables import write_parquet


def test_a_table_is_submitted_waited_for_and_read_back(client: Client, database: Database) -> None:
    job = client.submit(prompts(), prompt_column="prompt", max_tokens=16, temperature=0.5, name="a table", priority=-2)
    assert (job.last_status.state, job.last_status.counts.total) == ("queued", 3)
    assert job.last_status.name == "a table"
    worker = threading.Thread(target=finish_shard, args=(database,), kwargs={"failing": (1,)})
    worker.start()
    status = job.wait(timeout=30)
    worker.join()
    assert (status.state, status.counts.completed, status.counts.failed) == ("completed", 2, 1)
    assert status.finished_at is not None
    assert status.finished_at.tzinfo is not None
    table = job.to_table()
    assert table.select(["prompt", "key"]).equals(prompts())
    assert table["forq_output"].to_pylist() == ["an answer", None, "an answer"]
    assert "forq_tree" in job.to_table(with_trees=True).column_names
    assert job.to_table(failed_only=True)["key"].to_pylist() == [1]
    assert job.stats()["num_samples"] == 2


def test_results_come_in_batches_and_leave_nothing_behind(
    client: Client, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    job = client.submit(prompts(10))
    finish_shard(database)
    batches = job.results(batch_rows=4)
    assert next(batches).num_rows == 4
    assert list((tmp_path / "tmp").iterdir()) != []
    assert [batch.num_rows for batch in batches] == [4, 2]
    assert list((tmp_path / "tmp").iterdir()) == []
    unread = job.results()
    next(unread)
    unread.close()  # type: ignore[attr-defined]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_every_kind_of_data_is_taken(client: Client, tmp_path: Path, files: Path) -> None:
    table = prompts()
    path = tmp_path / "prompts.parquet"
    pq.write_table(table, path)
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(batch_lines(3))
    frame = pd.DataFrame({"prompt": ["one", "two", "three"], "key": [1, 2, 3]})
    for data in (table, table.to_reader(), table.to_batches()[0], frame, path, str(path), lines):
        assert client.submit(data).last_status.counts.total == 3, type(data)
    (files / "a.parquet").write_bytes(path.read_bytes())
    assert client.submit(f"file://{files}/a.parquet").last_status.counts.total == 3


def test_a_folder_that_is_not_there_is_named(client: Client, database: Database, tmp_path: Path) -> None:
    job = client.submit(prompts())
    with pytest.raises(FileNotFoundError, match=r"x\.parquet: there is no folder .*/nowhere$"):
        job.download(tmp_path / "nowhere" / "x.parquet")


def test_a_frame_comes_back_with_its_columns(client: Client, database: Database) -> None:
    frame = pd.DataFrame(
        {"prompt": ["one", "two"], "when": pd.to_datetime(["2026-01-01", "2026-01-02"]), "x": [0.5, 1.5]}
    )
    job = client.submit(frame)
    finish_shard(database)
    back = job.to_table().to_pandas()
    assert list(back["x"]) == [0.5, 1.5]
    assert list(back["when"]) == list(frame["when"])
    assert list(back["forq_output"]) == ["an answer", "an answer"]


def test_data_that_is_no_table_and_options_that_there_are_not(client: Client, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got a list"):
        client.submit([{"prompt": "one"}])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        client.submit(prompts(), max_token=3)  # type: ignore[call-arg]
    with pytest.raises(FileNotFoundError):
        client.submit(tmp_path / "none.parquet")


@pytest.mark.parametrize("name", ["name", "model", "seed"])
def test_only_turns_are_a_list(client: Client, name: str) -> None:
    with pytest.raises(TypeError, match=f"submit\\(\\): {name} is a list: give text or a number"):
        client.submit(prompts(), **{name: ["a", "b"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"turns is a str: give a list of texts"):
        client.submit(prompts(), turns="and then?")


def test_numbers_of_other_libraries_are_numbers() -> None:
    said = form_of({"max_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": True})  # type: ignore[typeddict-item]
    assert said == [("max_tokens", "3"), ("temperature", "0.5"), ("seed", "1")]


@pytest.mark.parametrize(
    "data",
    [
        pd.Series(["one"], name="prompt"),
        pd.DataFrame({"prompt": ["one", 2]}),
        pa.table({"prompt": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}),
    ],
)
def test_a_table_that_parquet_cannot_hold_is_told_in_one_line(client: Client, data: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        client.submit(data)
    assert "no table that Parquet can hold" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["", "run-1\n", "k é", "a b"])
def test_a_key_that_no_header_can_carry_is_refused_at_once_and_not_repeated(server: Server, key: str) -> None:
    with pytest.raises(ValueError, match="api_key has a character") as refusal:
        Client(server.url, api_key=f"forq_secret{key or ' '}")
    assert "secret" not in str(refusal.value)
    with Client(server.url) as client, pytest.raises(ValueError, match="idempotency_key is"):
        client.submit(prompts(), idempotency_key=key)


def test_a_path_is_no_id(client: Client) -> None:
    with pytest.raises(NotFoundError):
        client.job("../models")


def test_every_option_reaches_the_job(client: Client) -> None:
    job = client.submit(
        pa.table({"topic": ["forks"], "id": ["a"]}), model=MODEL, template="About {{ topic }}", system="Be brief.",
        turns=["And then?", "Shorter."], id_column="id", decoding="ar", max_tokens=5, temperature=0.0, top_p=0.9,
        seed=1, n=2, priority=3, kv_share=0.5, name="näme",
    )  # fmt: skip
    assert job.last_status.name == "näme"
    detail = client.job(job.id.lower())
    assert detail.id == job.id


def test_it_has_every_option_of_the_form() -> None:
    fields = {"turns" if name == "turn" else name for name in SubmitForm.model_fields}
    assert set(SubmitOptions.__annotations__) == fields - {"url"}


def test_many_small_batches_are_one_table(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"prompt": ["x"]})
    reader = pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in range(20_000)))
    write_parquet(reader, tmp_path / "small.parquet")
    file = pq.ParquetFile(tmp_path / "small.parquet")
    assert (file.metadata.num_rows, file.metadata.num_row_groups) == (20_000, 1)


def test_the_servers_line_is_the_error(client: Client) -> None:
    with pytest.raises(RefusedError, match="has no column 'promt'; did you mean 'prompt'") as refusal:
        client.submit(prompts(), prompt_column="promt")
    assert refusal.value.status == 422
    with pytest.raises(RefusedError, match="not configured"):
        client.submit(prompts(), model="nobody")
    with pytest.raises(RefusedError, match="under none of the roots"):
        client.submit("file:///etc/passwd.parquet")
    with pytest.raises(NotFoundError, match="no job") as missing:
        client.job(UNKNOWN_JOB)
    assert missing.value.status == 404
    with pytest.raises(RefusedError, match="max_tokens") as refused:
        client.submit(prompts(), max_tokens="many")  # type: ignore[arg-type]
    assert refused.value.values[0]["where"] == "body.max_tokens"


def test_an_upload_over_the_limit_is_told_as_such(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    path.write_bytes(bytes(40 << 20))  # the server's limit is 32 MiB
    with pytest.raises(RefusedError, match="the upload is over 33554432 bytes") as refusal:
        client.submit(path)
    assert refusal.value.status == 413


def test_a_wait_is_over_in_time_and_tells_changes(client: Client, database: Database) -> None:
    job = client.submit(prompts())
    with pytest.raises(StillRunningError, match=r"is still queued after 0\.2 s") as late:
        job.wait(timeout=0.2)
    assert late.value.status.state == "queued"
    seen: list[JobStatus] = []

    def note(status: JobStatus) -> None:
        seen.append(status)
        if len(seen) == 1:
            finish_shard(database)

    assert job.wait(timeout=30, progress=note).state == "completed"
    assert seen[0].state == "queued"
    assert seen[-1].state == "completed"


def test_a_wait_behind_a_proxy_that_takes_etags_away_asks_seldom(client: Client, database: Database) -> None:
    job = client.submit(prompts())
    answers: list[str] = []

    def take_away(response: httpx.Response) -> None:
        response.headers.pop("etag", None)
        answers.append(response.headers.get("etag", ""))

    client._transport._http.event_hooks["response"].append(take_away)
    with pytest.raises(StillRunningError):
        job.wait(timeout=1.5, progress=lambda status: None)
    assert len(answers) <= 3, "how it stands, a long poll, and what is left of the time"


def test_a_job_is_cancelled_and_retried(client: Client, database: Database) -> None:
    job = client.submit(prompts())
    assert job.cancel().state == "cancelled"
    with pytest.raises(ConflictError):
        job.cancel()
    job = client.submit(prompts())
    finish_shard(database, failing=(0, 2))
    assert job.wait(timeout=10).counts.failed == 2
    assert job.retry() == 2
    assert job.status().state == "queued"
    assert job.status().counts.completed == 1


def test_jobs_are_listed_over_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.client.client.PAGE_JOBS", 2)
    ids = [client.submit(prompts(1)).id for _ in range(5)]
    assert [job.id for job in client.jobs()][:5] == ids[::-1]
    assert [job.id for job in client.jobs(limit=3)] == ids[:1:-1]
    assert list(client.jobs(state="failed")) == []


def test_models_are_listed(client: Client) -> None:
    models = client.models()
    assert [model.id for model in models if model.is_default] == [MODEL]
    assert models[0].default_max_tokens > 0


def test_results_are_downloaded_and_exported(client: Client, database: Database, tmp_path: Path, files: Path) -> None:
    job = client.submit(prompts())
    finish_shard(database)
    assert pq.read_table(job.download(tmp_path / "answers.parquet")).num_rows == 3
    assert job.download(tmp_path / "answers.jsonl", format="jsonl").read_bytes().count(b"\n") == 3
    assert job.export(f"file://{files}/answers.parquet") == 3
    assert pq.read_table(files / "answers.parquet").num_rows == 3
    with pytest.raises(FileNotFoundError):
        job.download(tmp_path / "none" / "answers.parquet")
