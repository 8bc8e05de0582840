"""The process that reads a submitted file: what it may take, and what its parent says when it took more."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import MODEL, write_table

from jobs.confined import SOCKET_PREFIX, read_confined, socket_folders
from jobs.errors import BadInput
from jobs.reading import Reading, Request, read
from jobs.settings import Limits

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ prompt }}"
LEAST_MEMORY = 1 << 30


def silent(phase: str, done: int, total: int) -> None:
    pass


def confined(
    path: Path, *, template: str | None = None, report: Callable[..., None] = silent, **limits: Any
) -> Reading:
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    request = Request(path, MODEL, None, None, template, None, shard_rows=100)
    return read_confined(request, Limits(**limits), scratch, report)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_table(tmp_path / "rows.parquet", {"prompt": [f"row {i}" for i in range(1000)]})


def readers() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name == "forq-reader"]


def test_it_reads_what_would_be_read_here(rows: Path, tmp_path: Path) -> None:
    there = confined(rows)
    (tmp_path / "here").mkdir()
    request = Request(rows, MODEL, None, None, None, None, shard_rows=100)
    here = read(request, Limits(), tmp_path / "here", silent)
    assert there.spool.read_bytes() == here.spool.read_bytes()
    assert (there.mapping, there.num_rows, there.failed_per_shard) == (here.mapping, 1000, [0] * 10)
    assert (there.kept, there.version) == (here.kept, here.version)
    assert readers() == []


def test_progress_comes_through(rows: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    confined(rows, report=lambda *news: heard.append(news))
    assert heard[-1] == ("reading", 1000, 1000)
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)


def test_jsonl_becomes_parquet_there(tmp_path: Path) -> None:
    line = '{"custom_id": "%d", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    (tmp_path / "batch.jsonl").write_text("".join(line % i for i in range(3000)))
    phases: list[str] = []
    found = confined(tmp_path / "batch.jsonl", report=lambda phase, done, total: phases.append(phase))
    assert found.num_rows == 3000
    assert pq.read_metadata(found.kept).num_rows == 3000
    assert list(dict.fromkeys(phases)) == ["converting", "reading"]


def test_a_refusal_is_the_same_line(rows: Path) -> None:
    with pytest.raises(BadInput, match="the template uses nothing; the file's columns are prompt"):
        confined(rows, template="{{ nothing }}")


def test_bytes_of_the_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """Found by benchmarks.fuzz: Arrow quotes the byte it stumbled over."""
    write_table(tmp_path / "x.parquet", {"prompt": ["a"]})
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    said = []
    for place in range(len(data) - 200, len(data) - 8):
        damaged = bytearray(data)
        damaged[place] = 0x0E
        (tmp_path / "x.parquet").write_bytes(damaged)
        try:
            read(Request(tmp_path / "x.parquet", MODEL, None, None, None, None, 10), Limits(), tmp_path, silent)
        except BadInput as error:
            said.append(str(error))
    assert any("\\x0e" in line for line in said)
    assert all(line.isprintable() for line in said)


def test_the_least_memory_allowed_is_enough_for_an_ordinary_file(rows: Path) -> None:
    assert confined(rows, submit_memory_bytes=LEAST_MEMORY).num_rows == 1000


def test_a_template_without_end_is_stopped(rows: Path) -> None:
    with pytest.raises(BadInput, match=r"took longer than limits.submit_stall_s, 1 s, over one batch of rows"):
        confined(rows, template=ENDLESS, submit_stall_s=1)
    assert readers() == []


def test_a_template_that_fills_the_memory_costs_its_rows_only(rows: Path) -> None:
    found = confined(rows, template="{{ prompt.center(10**10) }}", submit_memory_bytes=LEAST_MEMORY)
    assert found.failed_per_shard == [100] * 10


def test_a_file_that_expands_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    """256 rows, one batch, of eight million characters each: two gigabytes out of a file of some kilobytes."""
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["x" * 8_000_000]))
    pq.write_table(pa.table({"prompt": cells.cast(pa.dictionary(pa.int32(), pa.string()))}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    with pytest.raises(BadInput, match=r"takes more memory to read than limits.submit_memory_bytes, 1073741824"):
        confined(tmp_path / "bomb.parquet", submit_memory_bytes=LEAST_MEMORY)


@pytest.mark.parametrize(
    ("death", "says"),
    [
        (signal.SIGSEGV, r"rows\.parquet, behind row \d+, broke its reader \(SIGSEGV\)"),
        (signal.SIGKILL, r"rows\.parquet, behind row \d+, takes more memory"),
    ],
)
def test_a_reader_that_dies_is_one_line(rows: Path, death: signal.Signals, says: str) -> None:
    def kill(phase: str, done: int, total: int) -> None:
        for child in readers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, death)

    # Enough rows that its pipe is full and it waits for us: it cannot have ended by then.
    many = write_table(rows.parent / "rows.parquet", {"prompt": ["x"] * 400_000})
    with pytest.raises(BadInput, match=says):
        confined(many, report=kill)


def test_a_full_disk_comes_through(rows: Path) -> None:
    (rows.parent / "scratch").mkdir()
    (rows.parent / "scratch" / "rows.arrow").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        confined(rows)


def test_an_interrupted_parent_leaves_no_reader(rows: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        confined(rows, report=interrupt)
    assert readers() == []


def test_a_temporary_folder_with_a_long_name_is_no_hindrance(rows: Path) -> None:
    """A socket's path has room for 107 bytes."""
    long = rows.parent / ("long" * 30)
    long.mkdir()
    code = (
        "import sys; from pathlib import Path; from jobs.confined import read_confined; "
        "from jobs.reading import Request; from jobs.settings import Limits; path = Path(sys.argv[1]); "
        "print(read_confined(Request(path, 'm', None, None, None, None, 100), Limits(), path.parent, print).num_rows)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(rows)], env={**os.environ, "TMPDIR": str(long)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["1000"], done.stderr
    assert list(long.iterdir()) == []


PARENT = """
import multiprocessing, sys, time
from pathlib import Path
from jobs.confined import read_confined
from jobs.reading import Request
from jobs.settings import Limits

def report(phase, done, total):
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    path = Path(sys.argv[1])
    read_confined(Request(path, "m", None, None, None, None, 100), Limits(submit_stall_s=20), path.parent, report)
"""


def test_a_reader_ends_with_its_parent(rows: Path) -> None:
    write_table(rows, {"prompt": ["x"] * 400_000})
    (rows.parent / "parent.py").write_text(PARENT)
    repository = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(rows.parent / "parent.py"), str(rows)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(repository)}, cwd=repository,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        reader = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        reader.wait(timeout=60)
    for folder in {found for place in socket_folders() for found in place.glob(f"{SOCKET_PREFIX}{parent.pid}-*")}:
        shutil.rmtree(folder)  # in earnest, `forq purge` and `forq doctor` do
