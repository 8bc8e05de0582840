"""The process that prepares a judging: the same as here, and one line where it is too much for it."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from answer_files import silent
from batches import MODEL, write_table

from db.session import Database
from jobs.errors import BadInput, Unavailable
from jobs.judging import run
from jobs.judging.confined import prepare_confined
from jobs.judging.folder import PROMPTS_FILE
from jobs.judging.options import JudgeOptions
from jobs.judging.preparing import ITEMS_FILE, Prepared, prepare, read_facts
from jobs.settings import Limits, Settings

LEAST_MEMORY = 1 << 30
ENDLESS = (
    'kind = "pointwise"\n'
    'prompt = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ response }}"'
)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    columns = {"prompt": [f"p{n // 2}" for n in range(600)], "response": [None, *(f"r{n}" for n in range(599))],
               "model": ["x", "y"] * 300}  # fmt: skip
    return write_table(tmp_path / "answers.parquet", columns)


def confined(
    path: Path, *, report: Callable[..., None] = silent, limits: Limits | None = None, **said: Any
) -> Prepared:
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    options = JudgeOptions(**{"kind": "pointwise", "models": (MODEL,), **said})
    return prepare_confined(path, options, limits or Limits(), scratch, report)


def readers() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name == "forq-reader"]


@pytest.mark.parametrize("kind", ["pointwise", "pairwise"])
def test_it_prepares_what_would_be_prepared_here(answers: Path, tmp_path: Path, kind: Any) -> None:
    there = confined(answers, kind=kind)
    (tmp_path / "here").mkdir()
    here = prepare(answers, JudgeOptions(kind, (MODEL,)), tmp_path / "here", silent)
    assert there == here
    assert list(read_facts(tmp_path / "scratch")) == (facts := list(read_facts(tmp_path / "here")))
    tables = [pq.read_table(tmp_path / where / PROMPTS_FILE) for where in ("scratch", "here")]
    assert tables[0] == tables[1]
    assert [fact.error is None for fact in facts[:2]] == [False, True]
    assert not any(fact.values for fact in facts)
    assert readers() == []


def test_progress_comes_through_in_phases(answers: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    confined(answers, report=lambda *news: heard.append(news))
    assert list(dict.fromkeys(phase for phase, _, _ in heard)) == ["reading", "rendering", "writing"]
    assert ("reading", 600, 600) in heard
    assert heard[-1] == ("writing", 599, 599)


def test_a_refusal_is_the_same_line(answers: Path) -> None:
    with pytest.raises(BadInput, match=r"answers\.parquet has no column for reference: name it like --column"):
        confined(answers, kind="reference")


def test_a_file_that_expands_beyond_the_memory_is_refused_and_nothing_is_left(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    """256 rows, one batch, of eight million characters each: two gigabytes out of a file of some kilobytes."""
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["x" * 8_000_000]))
    bomb = write_table(tmp_path / "bomb.parquet", pa.table({"prompt": ["p"] * 256, "response": cells}))
    assert bomb.stat().st_size < 1_000_000
    tight = settings.model_copy(update={"limits": Limits(submit_memory_bytes=LEAST_MEMORY)})
    options = JudgeOptions("pointwise", (MODEL,))
    with pytest.raises(BadInput, match=r"takes more memory to read than limits\.submit_memory_bytes, 1073741824"):
        run.begin(database, tight, bomb, options, tmp_path / "judged", silent)
    assert not (tmp_path / "judged").exists()


def test_a_rubric_without_end_is_stopped(answers: Path, tmp_path: Path) -> None:
    rubric = tmp_path / "endless.toml"
    rubric.write_text(ENDLESS)
    with pytest.raises(BadInput, match=r"took longer than limits\.submit_stall_s, 1 s"):
        confined(answers, rubric=str(rubric), limits=Limits(submit_stall_s=1))
    assert readers() == []


def test_a_reader_that_dies_is_one_line(tmp_path: Path) -> None:
    def kill(phase: str, done: int, total: int) -> None:
        for child in readers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGSEGV)

    # Enough rows that its pipe is full and it waits for us: it cannot have ended by then.
    many = write_table(tmp_path / "many.parquet", {"prompt": ["x"] * 400_000, "response": ["y"] * 400_000})
    with pytest.raises(BadInput, match=r"many\.parquet, behind row \d+, broke its reader \(SIGSEGV\)"):
        confined(many, report=kill)


def test_a_full_disk_comes_through(answers: Path) -> None:
    (answers.parent / "scratch").mkdir()
    (answers.parent / "scratch" / ITEMS_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        confined(answers)


def test_a_full_disk_is_one_line_of_the_command(
    database: Database, settings: Settings, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "prepare_confined", full)
    with pytest.raises(Unavailable, match=r"answers\.parquet cannot be prepared \(\[Errno 28\] No space"):
        run.begin(database, settings, answers, JudgeOptions("pointwise", (MODEL,)), tmp_path / "judged", silent)


def test_a_file_of_a_results_columns_alone_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "trees.parquet", {"forq_steps": [1]})
    with pytest.raises(BadInput, match="no column for prompt, response"):
        confined(path)
