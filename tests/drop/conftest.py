"""A home with an inbox, a database, a clock that moves when told to, and a worker that answers without an engine."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from db.models import Base, Job
from db.session import Database
from jobs import leases, results
from jobs.drop.inbox import Inbox, Scan
from jobs.settings import DropSettings, Settings

POLL_S, SETTLE_S, GIVE_UP_S = 1.0, 2.0, 30.0


def write_parquet(path: Path, prompts: list[str], **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": prompts, **columns}), path)
    return path


def answer_all(database: Database, model: str = "smollm2-135m") -> int:
    """Do what a worker does, with `answer to <prompt>` for an answer; returns the number of rows."""
    num_rows = 0
    while (lease := leases.acquire(database, model, "W" * 26, 60.0)) is not None:
        rows = []
        for row in results.load(database, lease).rows:
            stats = results.Stats(1, 0, 1, 2, 5, 1, 9, 5, 9, 0)
            text = f"answer to {row.payload.get('prompt') or row.payload['messages'][-1]['content']}"
            rows.append(results.RowResult(row.request_id, (results.SampleResult(text, "stop", 3, 2, stats, ()),)))
        results.write(database, lease, rows)
        leases.finish(database, lease)
        num_rows += len(rows)
    return num_rows


@dataclass
class Desk:
    """One test's drop folder."""

    settings: Settings
    database: Database
    now_s: float = 1000.0
    rung: list[tuple[str, int]] = field(default_factory=list)
    inbox: Inbox = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> Inbox:
        """A new process: nothing remembered but what lies on the disk."""
        self.inbox = Inbox(
            self.settings,
            self.database,
            ring=self.ring,
            clock=lambda: self.now_s,
            now=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        )
        self.home.mkdir(exist_ok=True)
        (self.home / "inbox").mkdir(mode=0o700, exist_ok=True)
        return self.inbox

    def ring(self, settings: Settings, model: str, times: int) -> bool:
        self.rung.append((model, times))
        return True

    @property
    def home(self) -> Path:
        return self.settings.home

    def path(self, name: str) -> Path:
        return self.home / "inbox" / name

    def drop(self, name: str, prompts: list[str]) -> Path:
        return write_parquet(self.path(name), prompts)

    def scan_after(self, seconds: float) -> Scan:
        self.now_s += seconds
        return self.inbox.scan()

    def settle(self) -> Scan:
        """See the files once, and again when they have rested."""
        self.inbox.scan()
        return self.scan_after(SETTLE_S)

    def listing(self, folder: str) -> list[str]:
        path = self.home / folder
        return sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.is_dir() else []

    def claims(self) -> list[str]:
        path = self.home / "inbox" / ".claimed"
        return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.name != ".lock")

    def receipt(self, stem: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.home / "outbox" / f"{stem}.job.json").read_text())
        return value

    def reason(self, name: str) -> str:
        text = (self.home / "rejected" / f"{name}.reason.txt").read_text()
        assert text.count("\n") == 1, "a reason is one line"
        assert text.endswith("(rejected 2026-01-02T03:04:05Z)\n")
        return text

    def results(self, name: str) -> list[dict[str, Any]]:
        path = self.home / "outbox" / name
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows

    def jobs(self) -> list[Any]:
        with self.database.read() as connection:
            return list(connection.execute(Job.__table__.select().order_by(Job.id)).all())

    def answer_all(self) -> int:
        return answer_all(self.database)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'forq.db'}")
    Base.metadata.create_all(database.engine)
    yield database
    database.dispose()


@pytest.fixture
def make_desk(tmp_path: Path, database: Database) -> Callable[..., Desk]:
    def make(**drop: float) -> Desk:
        values = {"poll_s": POLL_S, "settle_s": SETTLE_S, "give_up_s": GIVE_UP_S, **drop}
        return Desk(Settings(home=tmp_path / "home", drop=DropSettings(**values)), database)

    return make


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()
