"""Runs commands in this process, on a FORQ_HOME of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import Forq, Result

from jobs.cli import main
from jobs.settings import get_settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty FORQ_HOME, and a working folder without a forq.toml."""
    for name in [name for name in os.environ if name.startswith("FORQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORQ_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    get_settings.cache_clear()
    yield tmp_path / "home"
    get_settings.cache_clear()


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Forq:
    """Run a command as the installed script would, in this process."""

    def call(*args: str) -> Result:
        get_settings.cache_clear()
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Result(int(exit_.value.code or 0), out, err)

    return call


@pytest.fixture
def prompts(home: Path) -> Path:
    path = Path("prompts.parquet").absolute()
    pq.write_table(pa.table({"prompt": ["one", "two", "three"], "number": [1, 2, 3]}), path)
    return path
