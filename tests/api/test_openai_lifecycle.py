"""The official client's life cycle of a batch, on a server process."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_support import finish_shard
from openai.types.chat import ChatCompletion
from openai_support import answering, client_of, create, line, lines, many, read_lines, upload, wait_for
from server_process import Server, until

from db.session import Database
from jobs.settings import DEFAULT_MODEL, Settings


@pytest.fixture
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    until(server.is_up)
    yield server
    server.terminate()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


def test_a_batch_goes_from_upload_to_output_with_the_official_client(client: Any, database: Database) -> None:
    content = lines(
        line("a", model=DEFAULT_MODEL, max_completion_tokens=5, temperature=0, seed=3),
        line("b", model=DEFAULT_MODEL, temperature=99),
        line("c", n=1, user="u", metadata={"k": "v"}, stream=False),
    )
    file = upload(client, content)
    assert (file.object, file.purpose, file.status, file.bytes) == ("file", "batch", "processed", len(content))
    batch = create(client, file.id, metadata={"run": "1"})
    assert (batch.object, batch.status, batch.metadata, batch.endpoint) == (
        "batch", "validating", {"run": "1"}, "/v1/chat/completions",
    )  # fmt: skip
    with answering(database):
        done = wait_for(client, batch.id, "completed")
    assert done.model == DEFAULT_MODEL
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert done.usage.to_dict() == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 16,
    }  # fmt: skip
    answers, errors = read_lines(client, done.output_file_id), read_lines(client, done.error_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "c"]
    assert answers[0]["error"] is None
    assert answers[0]["response"]["status_code"] == 200
    body = ChatCompletion.model_validate(answers[0]["response"]["body"])
    assert (body.model, body.choices[0].message.content, body.choices[0].finish_reason) == (
        DEFAULT_MODEL, "an answer", "stop",
    )  # fmt: skip
    assert answers[0]["response"]["body"]["forq"]["receipts"][0]["peak_cached_tokens"] == 8
    (error,) = errors
    assert error["custom_id"] == "b"
    assert error["response"]["status_code"] == 400
    assert "temperature" in error["response"]["body"]["error"]["message"]


def test_a_server_that_is_killed_in_any_state_is_made_up_for_by_the_next(
    settings: Settings, database: Database
) -> None:
    """SIGKILL while it validates, while the job runs, and while it writes output; another goes on each time."""
    quick = {"FORQ_BATCHES__CLAIM_S": "1", "FORQ_BATCHES__POLL_S": "0.1"}

    def start() -> tuple[Server, Any]:
        server = Server(settings, environment=quick)
        until(server.is_up, 120)
        return server, client_of(server.url)

    def kill(server: Server) -> None:
        server.process.kill()
        server.process.communicate()

    server, client = start()
    file = upload(client, many(2000))
    batch_id = create(client, file.id).id
    kill(server)  # right after the answer: it is validating, or just done with it
    server, client = start()
    wait_for(client, batch_id, "in_progress")
    kill(server)
    finish_shard(database)  # all its rows are one shard of this server
    server, client = start()
    wait_for(client, batch_id, "finalizing", "completed")
    kill(server)
    server, client = start()
    done = wait_for(client, batch_id, "completed")
    assert done.request_counts.to_dict() == {"total": 2000, "completed": 2000, "failed": 0}
    assert [each["custom_id"] for each in read_lines(client, done.output_file_id)] == [f"c{i}" for i in range(2000)]
    assert len(list(client.files.list())) == 2
    assert len(list(client.batches.list())) == 1
    server.terminate()


def test_the_client_pages_through_lists_and_its_errors_are_typed(client: Any) -> None:
    files = [upload(client, many(i + 1)).id for i in range(5)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == files
    ids = [create(client, files[0], metadata={"i": str(i)}).id for i in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    with pytest.raises(openai.NotFoundError) as missing:
        client.files.retrieve("file-x")
    assert missing.value.code == "not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, files[0], endpoint="/v1/embeddings")
    assert refused.value.param == "endpoint"
    assert client.files.delete(files[0]).deleted
    expiring = upload(client, many(1), expires_after={"anchor": "created_at", "seconds": 3600})
    assert expiring.expires_at == expiring.created_at + 3600
    big = upload(client, b"x" * (3 << 20))
    assert client.files.content(big.id).read() == b"x" * (3 << 20)
    with pytest.raises(openai.APIStatusError, match=r"limits\.max_upload_bytes"):
        upload(client, b"x" * (33 << 20))
