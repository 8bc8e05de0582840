"""kill -9 of the command and of a worker: the same command goes on with the job it made, and counts stay right."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from answer_files import silent
from batches import MODEL, acquire, check_integrity, drain, expire_lease, sample, write_table

from db.session import Database
from jobs import leases, results, service
from jobs.errors import BadInput
from jobs.judging import run
from jobs.judging.folder import REPORT_FILE, RESULTS_FILE, open_folder
from jobs.judging.options import JudgeOptions
from jobs.settings import Settings

OPTIONS = JudgeOptions("pointwise", (MODEL,))
REPOSITORY = Path(__file__).parents[3]
COMMAND = """
import os, signal, sys
from pathlib import Path

from batches import MODEL, settings_in
from db.session import Database
from jobs import store
from jobs.errors import BadInput
from jobs.judging import run
from jobs.judging.options import JudgeOptions

url, home, answers, folder, name, times = sys.argv[1:]
seen, publish = 0, store.publish


def die(temporary, target):
    global seen
    seen += target.name == name
    if target.name == name and seen == int(times):
        os.kill(os.getpid(), signal.SIGKILL)
    publish(temporary, target)


def silent(*news):
    pass


store.publish = die
database, settings, options = Database(url), settings_in(Path(home)), JudgeOptions("pointwise", (MODEL,))
begun = run.begin(database, settings, Path(answers), options, Path(folder), silent)
if run.wait(database, begun, silent, silent, timeout_s=0):
    run.finish(database, settings, Path(answers), options, begun, silent)
"""


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return write_table(tmp_path / "answers.parquet", {"prompt": ["p"] * 10, "response": [f"r{n}" for n in range(10)]})


def begin(database: Database, settings: Settings, answers: Path) -> run.Begun:
    return run.begin(database, settings, answers, OPTIONS, answers.parent / "judged", silent)


def judged(row: results.PendingRow) -> results.RowResult:
    answer = row.payload["messages"][-1]["content"].partition("=== Answer ===\nr")[2][0]
    return results.RowResult(row.request_id, (sample(str(int(answer) % 5 + 1)),))


def check_report(database: Database, settings: Settings, answers: Path) -> None:
    """What the same command makes of it in the end."""
    begun = begin(database, settings, answers)
    drain(database, judged)
    assert run.wait(database, begun, silent, silent, timeout_s=0)
    report = run.finish(database, settings, answers, OPTIONS, begun, silent)
    (judge,) = report["judges"]
    assert (judge["total"], judge["judged"], judge["null"], judge["failed"]) == (10, 10, 0, 0)
    rows: list[dict[str, Any]] = pq.read_table(begun.folder / RESULTS_FILE).to_pylist()
    assert [(row["row"], row["score"]) for row in rows] == [(n, n % 5 + 1) for n in range(10)]
    assert len(service.list_jobs(database)) == 1
    assert not [entry.name for entry in begun.folder.iterdir() if entry.name.startswith(".")]
    check_integrity(database, begun.jobs[MODEL])


@pytest.mark.parametrize(
    ("name", "times"), [("judge.json", 1), ("prompts.parquet", 1), ("judge.json", 2), (REPORT_FILE, 1)]
)
def test_a_command_that_is_killed_goes_on_where_it_was_and_asks_nothing_twice(
    database: Database, database_url: str, settings: Settings, answers: Path, name: str, times: int
) -> None:
    """Killed with a file half in place: the folder's first note, the prompts, the note of the job, the report."""
    if name == REPORT_FILE:
        begin(database, settings, answers)
        drain(database, judged)
    folder = answers.parent / "judged"
    said = [sys.executable, "-c", COMMAND, database_url, settings.home, answers, folder, name, str(times)]
    with tempfile.TemporaryDirectory(prefix="forq-kill-", dir="/tmp") as scratch:  # short: sockets lie in it
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'jobs'}", "TMPDIR": scratch}
        done = subprocess.run(list(map(str, said)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert any(entry.name.startswith(f".{name}.") for entry in folder.iterdir())
    check_report(database, settings, answers)


def test_only_what_nobody_is_writing_is_cleared(tmp_path: Path) -> None:
    names = {pid: f".judge.json.{pid}.0123abcd.tmp" for pid in (os.getpid(), os.getppid())}
    for name in (*names.values(), ".mine.parquet.999999999.0123abcd.tmp"):
        (tmp_path / name).touch()
    with pytest.raises(BadInput, match="is not empty and holds no judging"):
        open_folder(tmp_path, "fingerprint")
    (tmp_path / ".mine.parquet.999999999.0123abcd.tmp").unlink()
    state = open_folder(tmp_path, "fingerprint")
    assert {entry.name for entry in tmp_path.iterdir()} == {names[os.getppid()], "judge.json"}
    assert open_folder(tmp_path, "fingerprint") == state


def test_a_worker_that_is_killed_costs_its_unwritten_rows_only(
    database: Database, settings: Settings, answers: Path
) -> None:
    begun = begin(database, settings, answers)
    lease = acquire(database)
    written = results.load(database, lease).rows[:2]
    results.write(database, lease, [judged(row) for row in written])
    assert begin(database, settings, answers).jobs == begun.jobs
    expire_lease(database, lease.shard_id)
    assert leases.sweep(database) == 1
    asked: list[int] = []

    def once(row: results.PendingRow) -> results.RowResult:
        asked.append(row.row_index)
        return judged(row)

    drain(database, once)
    assert len(asked) == len(set(asked)) == 8
    assert not set(asked) & {row.row_index for row in written}
    check_report(database, settings, answers)
