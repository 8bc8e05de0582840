"""A database, the steps of an API process taken by hand, and what must add up."""

import json
from pathlib import Path
from typing import Any

from openai_support import CHAT
from sqlalchemy import func, select, update

from db.clock import db_now
from db.models import Batch
from db.session import Database
from jobs import batch_work, batches, openai_files
from jobs.settings import Settings

NOTHING = lambda *_: None  # noqa: E731


class Desk:
    """A database and the steps of an API process, taken by hand."""

    def __init__(self, settings: Settings, database: Database, folder: Path) -> None:
        self.settings, self.database, self._folder = settings, database, folder

    def upload(self, content: bytes, name: str = "batch.jsonl", tenant: str = "default") -> str:
        path = self._folder / name
        path.write_bytes(content)
        created = openai_files.create(self.database, self.settings, path, tenant=tenant, purpose="batch")
        return str(created["id"])

    def create(self, content: bytes, name: str = "batch.jsonl", endpoint: str = CHAT, **asked: Any) -> str:
        new = batches.NewBatch(self.upload(content, name), endpoint, asked.pop("window", "24h"), **asked)
        return str(batches.create(self.database, self.settings, new, "default", None)["id"])

    def step(self) -> int:
        """One look, and the work that it found."""
        todos = batch_work.look(self.database, self.settings)
        for todo in todos:
            todo.do(self.database, self.settings, todo.batch_id, NOTHING)
        return len(todos)

    def see(self, batch_id: str) -> dict[str, Any]:
        return batches.find(self.database, batch_id, None)

    def state(self, batch_id: str) -> str:
        return str(self.see(batch_id)["status"])

    def file(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        path = openai_files.content_path(self.settings, openai_files.find(self.database, file_id, None))
        return [json.loads(text) for text in path.read_text().splitlines()]

    def outputs(self, batch_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        batch = self.see(batch_id)
        return self.file(batch["output_file_id"]), self.file(batch["error_file_id"])

    def count(self, table: Any) -> int:
        with self.database.read() as connection:
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    def is_late(self, batch_id: str) -> None:
        with self.database.write() as connection:
            connection.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=db_now()))

    def end(self, batch_id: str, *states: str) -> dict[str, Any]:
        for _ in range(10):
            if self.state(batch_id) in states:
                return self.see(batch_id)
            self.step()
        raise AssertionError(self.see(batch_id))


def check_sums(desk: Desk, batch_id: str, total: int) -> dict[str, Any]:
    """Output lines are the completed, output and error lines the total, in order, each id once."""
    batch = desk.see(batch_id)
    answers, errors = desk.outputs(batch_id)
    counts = batch["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (total, len(answers), len(errors))
    assert len(answers) + len(errors) == total
    ids = [int(each["custom_id"][1:]) for each in answers], [int(each["custom_id"][1:]) for each in errors]
    assert sorted(ids[0] + ids[1]) == list(range(total))
    assert all(each == sorted(each) for each in ids)
    return batch
