"""A disk that is really full, under each part in turn: one line, nothing half-written, and on it goes with room."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from service import eventually, free_port
from small_disks import SmallDisk
from sqlalchemy import func, select

from db.models import Job, Output, Request
from db.session import Database
from db.upgrade import current_revision, newest_revision, upgrade
from jobs.settings import Settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]
QUEUE = {"shard_rows": 32, "heartbeat_s": 0.3, "sweep_s": 0.3, "flush_s": 0.1, "lease_s": 60.0, "rows_in_flight": 64}

MakeDisk = Callable[[int], SmallDisk]


class Home:
    """A FORQ_HOME on the small disk; logs and temporary files are elsewhere."""

    def __init__(self, disk: SmallDisk, outside: Path) -> None:
        self.disk, self.outside = disk, outside
        self.path = disk.folder / "home"
        self.path.mkdir()
        self.scratch = outside / "scratch"
        self.scratch.mkdir()
        self.settings = Settings(home=self.path)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
        queue = {f"FORQ_QUEUE__{name.upper()}": str(value) for name, value in QUEUE.items()}
        return {**kept, **queue, "FORQ_HOME": str(self.path), "TMPDIR": str(self.scratch), **more}

    def forq(self, *args: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *map(str, args)], cwd=self.outside, capture_output=True, text=True,
            env=self.environment(PYTHONPATH=str(REPOSITORY), **environment), timeout=180, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def refused(self, *args: object, **environment: str) -> str:
        """Run a command that must fail with one line, and return that."""
        done = self.forq(*args, **environment)
        assert (done.returncode, done.stdout) == (1, ""), (done.stdout, done.stderr)
        said = [
            line
            for line in done.stderr.splitlines()
            if not line.startswith(("reading: ", "storing: ", "exporting: ", "copying"))
        ]
        assert len(said) == 1, done.stderr
        return said[0]

    def submit(self, prompts: list[str]) -> str:
        done = self.forq("submit", write(self.outside, prompts), "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout.splitlines()[-1])["job_id"])

    def count(self, table: Any) -> int:
        database = Database(self.settings.sqlalchemy_url)
        try:
            with database.read() as connection:
                return connection.execute(select(func.count()).select_from(table)).scalar_one()
        finally:
            database.dispose()


def write(folder: Path, prompts: list[str]) -> Path:
    path = folder / "input.parquet"
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


def prompts_of(num_rows: int, num_chars: int = 0) -> list[str]:
    return [f"row {number} ".ljust(num_chars, "x") for number in range(num_rows)]


@pytest.fixture
def home(small_disk: MakeDisk, tmp_path: Path) -> Home:
    home = Home(small_disk(24 * MIB), tmp_path)
    upgrade(home.settings.sqlalchemy_url)
    return home


@pytest.fixture
def worker(home: Home) -> Iterator["subprocess.Popen[bytes]"]:
    """A real worker process over an engine that answers in 20 to 40 ms."""
    log = (home.outside / "worker.log").open("wb")
    environment = home.environment(
        PYTHONPATH=str(REPOSITORY), LATENCY_S="0.02", JOURNAL=str(home.outside / "journal.jsonl")
    )
    script = Path(__file__).with_name("faulty_worker.py")
    process = subprocess.Popen(
        [sys.executable, script, "W" * 26], cwd=home.outside, stdout=log, stderr=log, env=environment
    )
    yield process
    process.kill()
    process.wait()
    log.close()


def test_a_worker_on_a_full_disk_pauses_with_one_line_and_goes_on_when_there_is_room(
    home: Home, worker: "subprocess.Popen[bytes]"
) -> None:
    num_rows = 4000
    job = home.submit(prompts_of(num_rows))
    eventually(lambda: home.count(Output) > 50, "the first rows are answered")
    home.disk.fill()
    log = home.outside / "worker.log"
    eventually(lambda: "database_unreachable" in log.read_text(), "the worker says that the disk is full")
    before = home.count(Output)
    time.sleep(2)
    assert worker.poll() is None
    assert home.count(Output) - before < num_rows / 2  # what still fits into the database's own free pages
    assert before < num_rows
    home.disk.free()

    database = Database(home.settings.sqlalchemy_url)

    def ended() -> bool:
        with database.read() as connection:
            return connection.execute(select(Job.state).where(Job.id == job)).scalar_one() == "completed"

    eventually(ended, "the job goes on and ends")
    with database.read() as connection:
        rows = connection.execute(
            select(Request.row_index, Output.text).join(Output, Output.request_id == Request.id)
        ).all()
    database.dispose()
    assert sorted(row.row_index for row in rows) == list(range(num_rows))
    events = [json.loads(line)["event"] for line in log.read_text().splitlines() if line.startswith("{")]
    counts = Counter(event for event in events if not event.startswith("shard_"))
    assert (counts["database_unreachable"], counts["database_back"]) == (1, 1), counts
    assert "disk" in next(line for line in log.read_text().splitlines() if "database_unreachable" in line)
    assert "Traceback" not in log.read_text()
    generated = Counter(
        json.loads(line)["key"] for line in (home.outside / "journal.jsonl").read_text().splitlines()
    )  # of one lease each: what had been answered waited in memory and was not asked for again
    assert len(generated) == num_rows
    assert set(generated.values()) == {1}


def test_a_submit_to_a_full_disk_is_one_line_and_stores_nothing(home: Home, small_disk: MakeDisk) -> None:
    path = write(home.outside, prompts_of(20_000, 300))
    home.disk.fill()
    assert "make room on its disk" in home.refused("submit", path)  # SQLite cannot even open its log
    home.disk.free()
    home.disk.fill(but=256 << 10)
    assert "No space left on device" in home.refused("submit", path)
    home.disk.free()
    home.disk.fill(but=4 * MIB)  # the file can be kept, the rows do not fit
    assert "disk is full" in home.refused("submit", path)
    assert home.count(Job) == home.count(Request) == 0
    home.disk.free()

    scratch = small_disk(2 * MIB)
    scratch.fill(but=64 << 10)
    assert "No space left on device" in home.refused("submit", path, TMPDIR=str(scratch.folder))
    assert [name for name in scratch.names() if "forq-submit" in name] == []
    assert home.forq("submit", write(home.outside, prompts_of(100))).returncode == 0
    assert home.count(Request) == 100


def test_an_export_or_backup_to_a_full_disk_is_one_line_and_no_half_file(home: Home, small_disk: MakeDisk) -> None:
    job = home.submit([os.urandom(300).hex() for _ in range(5000)])
    target = small_disk(MIB)
    for name in ("out.parquet", "out.jsonl"):
        said = home.refused("export", job, target.folder / name)
        assert f"{name}: cannot be written (" in said
        assert "No space left on device): check space and rights" in said
        assert target.names() == []
    assert home.refused("db", "backup", target.folder / "backup.db")
    assert target.names() == []
    (target.folder / "old.parquet").write_bytes(b"of yesterday")
    home.refused("export", job, target.folder / "old.parquet")
    assert target.names() == ["old.parquet"]
    assert (target.folder / "old.parquet").read_bytes() == b"of yesterday"


def test_a_migration_on_a_full_disk_leaves_the_old_schema_whole(small_disk: MakeDisk, tmp_path: Path) -> None:
    home = Home(small_disk(24 * MIB), tmp_path)
    url = home.settings.sqlalchemy_url
    upgrade(url, "0001")
    database = Database(url)
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO jobs (id, state, model, decoding, sampling, mapping, source, data_key, priority, num_rows, "
            "created_at) VALUES ('J', 'completed', 'm', 'ar', '{}', '{}', 'cli', 'k', 0, 9000, '2026-01-01 00:00:00')"
        )
        connection.exec_driver_sql(
            "INSERT INTO requests (job_id, row_index, payload, state) VALUES ('J', ?, ?, 'completed')",
            [(row, "x" * 400) for row in range(9000)],
        )
        connection.exec_driver_sql(
            "INSERT INTO outputs (request_id, sample, text, prompt_tokens, output_tokens) "
            "SELECT id, 0, payload, 1, 1 FROM requests"
        )

    def stored() -> list[Any]:
        with database.read() as connection:
            return list(connection.exec_driver_sql("SELECT r.row_index, r.payload, o.text FROM requests r "
                                                   "JOIN outputs o ON o.request_id = r.id ORDER BY 1"))  # fmt: skip

    before = stored()
    with database.read() as connection:  # or the upgrade would fit into the log's old pages
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    home.disk.fill(but=96 << 10)
    assert "disk is full" in home.refused("db", "upgrade")
    assert current_revision(database) == "0001"
    assert stored() == before
    with database.write() as connection:  # the old version goes on with it
        connection.exec_driver_sql("UPDATE jobs SET priority = 1")
    home.disk.free()
    assert home.forq("db", "upgrade").returncode == 0
    assert current_revision(database) == newest_revision()
    assert stored() == before
    assert before
    database.dispose()


def test_the_api_on_a_full_disk_says_so_and_goes_on(home: Home) -> None:
    port = free_port()
    log = (home.outside / "api.log").open("wb")
    api = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "api", "--port", str(port)], cwd=home.outside, stdout=log, stderr=log,
        env=home.environment(PYTHONPATH=str(REPOSITORY)),
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def up() -> bool:
                try:
                    return client.get("/healthz").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(up, "the API is up")
            content = write(home.outside, prompts_of(20_000, 300)).read_bytes() + bytes(4 * MIB)
            home.disk.fill()
            refused = client.post("/v1/jobs", files={"file": ("a.parquet", content)})
            assert refused.status_code == 503, refused.text
            assert refused.json()["detail"].startswith("the server's disk is full")
            assert "retry-after" in refused.headers
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/jobs").json()["jobs"] == []
            home.disk.free()
            good = write(home.outside, prompts_of(10)).read_bytes()
            assert client.post("/v1/jobs", files={"file": ("a.parquet", good)}).status_code == 201
            assert list((home.path / "tmp").iterdir()) == []
    finally:
        api.terminate()
        api.wait(30)
        log.close()
    assert "Traceback" not in (home.outside / "api.log").read_text()
