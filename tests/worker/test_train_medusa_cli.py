"""`forq train-medusa` takes a configured model by its alias, beside folders."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tiny_models import make_tiny_model

from apar.decoding.medusa_heads import load_heads
from jobs.settings import get_settings
from worker.train_medusa_cli import train_medusa


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_tiny_model(tmp_path / "tiny")
    table = pa.table({"prompt": ["a", "b", "c"], "response": ["some text", "more text", "the end"]})
    pq.write_table(table, tmp_path / "answers.parquet")
    (tmp_path / "forq.toml").write_text(f'[models.small]\npath = "{tmp_path / "tiny"}"\n')
    monkeypatch.setenv("FORQ_CONFIG", str(tmp_path / "forq.toml"))
    monkeypatch.setenv("FORQ_HOME", str(tmp_path / "home"))
    get_settings.cache_clear()
    yield tmp_path
    get_settings.cache_clear()


@pytest.mark.parametrize("base", ["small", "folder"])
def test_a_base_is_an_alias_or_a_folder(room: Path, base: str) -> None:
    given = {
        "base": room / "tiny" if base == "folder" else base, "data": room / "answers.parquet", "out": room / "run",
        "heads": 1, "layers": 1, "steps": 1, "batch-size": 1, "row-tokens": 64, "dtype": "fp32",
    }  # fmt: skip
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    result = CliRunner().invoke(train_medusa, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    heads = load_heads(Path(json.loads(result.stdout)["heads"]))
    assert (heads.num_heads, heads.num_layers) == (1, 1)


def test_neither_is_said_in_one_line(room: Path) -> None:
    result = CliRunner().invoke(
        train_medusa, ["--base", "smaller", "--data", str(room / "answers.parquet"), "--out", str(room / "run")]
    )
    assert result.exit_code == 2
    assert "smaller is no model folder: it has no config.json" in result.stderr
