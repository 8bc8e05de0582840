"""Our objects beside the official client's types: every field that its users may read is there, of the right kind."""

from typing import Any

import openai.types as theirs
import pytest
from api_support import finish_shard
from batch_desk import Desk
from openai.types.batch import Errors
from openai_support import line, lines, many
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient

from api.app import create_app
from api.openai import schemas
from db.states import BatchState
from jobs import batches, openai_files

OURS_ALONE = {schemas.BatchObject: {"forq"}}


@pytest.mark.parametrize(
    ("ours", "official"),
    [
        (schemas.BatchObject, theirs.Batch),
        (schemas.RequestCounts, theirs.BatchRequestCounts),
        (schemas.LineErrors, Errors),
        (schemas.LineError, theirs.BatchError),
        (schemas.Usage, theirs.BatchUsage),
        (schemas.FileObject, theirs.FileObject),
        (schemas.DeletedFile, theirs.FileDeleted),
    ],
)
def test_our_objects_have_every_field_of_the_clients(ours: type[BaseModel], official: type[BaseModel]) -> None:
    assert set(ours.model_fields) - OURS_ALONE.get(ours, set()) == set(official.model_fields)


def test_our_states_are_the_clients() -> None:
    states = TypeAdapter(theirs.Batch.model_fields["status"].annotation).json_schema()["enum"]
    assert set(states) == set(BatchState)


def check(official: type[BaseModel], value: dict[str, Any]) -> Any:
    """As the client's types have it, strictly: nothing is converted, no field is left out."""
    read = official.model_validate(value, strict=True)
    assert set(official.model_fields) <= set(value)
    return read


def test_batches_and_files_are_the_clients_in_every_state(desk: Desk) -> None:
    refused = desk.create(lines(line("a", model="gpt-9")))
    ended = desk.create(many(8, temperature=0), labels={"run": "1"})
    check(theirs.Batch, desk.see(ended))
    desk.end(refused, "failed")
    assert check(theirs.Batch, desk.see(refused)).errors.data[0].line == 1
    check(theirs.Batch, desk.see(ended))
    finish_shard(desk.database, failing=(1,))
    batches.cancel(desk.database, ended, None)
    check(theirs.Batch, desk.see(ended))
    batch = check(theirs.Batch, desk.end(ended, "cancelled"))
    assert batch.usage.total_tokens == 24
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        check(theirs.FileObject, openai_files.view(openai_files.find(desk.database, file_id, None)))
    with TestClient(create_app(desk.settings), base_url="http://localhost") as client:
        check(theirs.FileObject, client.get(f"/v1/files/{file_id}").json())
        check(theirs.Batch, client.get(f"/v1/batches/{ended}").json())
        check(theirs.FileDeleted, client.delete(f"/v1/files/{batch.input_file_id}").json())


def test_our_models_are_the_clients(client: TestClient) -> None:
    for model in client.get("/v1/models").json()["data"]:
        theirs.Model.model_validate(model, strict=True)
