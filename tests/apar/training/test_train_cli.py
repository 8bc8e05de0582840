"""`forq train` as a command: one line for what is wrong, and what to do about it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from synthetic_trees import made_up_rows, make_base, write_rows

from apar.training.cli import train


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_base(folder / "base")
    write_rows(folder / "data.parquet", made_up_rows(20))
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"]}), folder / "bare.parquet")
    return folder


def run(files: Path, out: Path, **options: Any) -> Result:
    given = {
        "base": files / "base", "data": files / "data.parquet", "out": out, "steps": 2, "batch_size": 2,
        "row_tokens": 256, "dtype": "fp32", **options,
    }  # fmt: skip
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(train, [*arguments, "--json"])


def test_it_trains_and_prints_its_result(files: Path, tmp_path: Path) -> None:
    result = run(files, tmp_path / "out")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["finished"]
    assert Path(printed["model"], "config.json").is_file()
    assert "fewer than the" in result.stderr  # what the trees save
    assert run(files, tmp_path / "out").exit_code == 0  # done already


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "nowhere"}, "nowhere is no model folder: it has no config.json"),
        ({"data": "nowhere.parquet"}, "nowhere.parquet does not exist"),
        ({"data": "bare"}, "has no column nodes: run `forq data extract` first"),
        ({"data": "config"}, "is no Parquet file"),
        ({"prompt_column": "question"}, "has no column question: give --prompt-column, one of prompt, response"),
        ({"batch_size": 0}, "--batch-size is 0: use at least 1"),
        ({"batch_size": 128}, "--batch-size is 128, which is 64 structured answers in a step, and there are 9"),
        ({"lr": -1}, "--lr is -1.0: use a number above 0"),
        ({"structured_share": 2}, "--structured-share is 2.0: use 0 to 1"),
        ({"distill": -1}, "--distill is -1.0: use 0 to 1"),
        ({"row_tokens": 4096}, "has 512 positions, answers have up to 4096 tokens: give --max-tokens 512"),
        ({"max_tokens": 300}, "--max-tokens is 300, a row holds 256 tokens"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    places = {"bare": files / "bare.parquet", "config": files / "base" / "config.json"}
    result = run(files, tmp_path / "out", **{k: places.get(str(v), v) for k, v in options.items()})
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()[-1:]) == 1
    assert "Traceback" not in result.output


def test_steps_and_epochs_exclude_each_other(files: Path, tmp_path: Path) -> None:
    result = run(files, tmp_path / "out", epochs=1)
    assert result.exit_code == 2
    assert "--steps or --epochs" in result.stderr
