"""`benchmarks.decoders` from its command line, on the tiny model: lines, equality, going on, plots, refusals."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from apar.decoding import DecodingError
from benchmarks.decoders import main
from benchmarks.decoding.contenders import parse
from benchmarks.decoding.prompts import SETS, Prompt, spread

REPOSITORY = Path(__file__).parents[3]
FIELDS = {
    "decoder", "category", "tokens", "forwards", "de", "hr", "al", "tokens_per_s", "draft_nodes", "verify_nodes",
    "identical",
}  # fmt: skip
Run = Callable[..., Result]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = {"prompt": ["the other one", "in an inn", "at the table", "so it is"], "category": ["a", "b", "a", "b"]}
    pq.write_table(pa.table(rows), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


@pytest.fixture
def run(tiny_folder: Path, prompts: Path) -> Run:
    def run(*args: str, model: str = str(tiny_folder), source: str = str(prompts)) -> Result:
        options = ["--model", model, "--prompts", source, "--max-tokens", "40"]
        return CliRunner().invoke(main, [*options, *args])

    return run


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_one_line_per_decoder_and_category(run: Run) -> None:
    rows = lines(run("--decoders", "ar,apar,ptd,apar+ptd,lade,apar+lade", "--json"))
    assert [(row["decoder"], row["category"]) for row in rows] == [
        (decoder, category)
        for decoder in ("ar", "apar", "ptd", "apar+ptd", "lade", "apar+lade")
        for category in ("a", "b", "all")
    ]
    assert all(set(row) >= FIELDS and row["identical"] for row in rows)
    for row in rows:
        assert row["de"] == pytest.approx(row["tokens"] / row["forwards"], abs=1e-3)
        assert row["rows"] == row["rows_identical"] == (4 if row["category"] == "all" else 2)
        assert row["tokens_per_s"] > 0
    plain = {row["decoder"]: row for row in rows if row["category"] == "all"}
    assert plain["ar"]["de"] == plain["ar"]["al"] == plain["ar"]["speedup"] == 1.0
    assert plain["ar"]["draft_nodes"] == plain["ar"]["verify_nodes"] == 0
    assert plain["ptd"]["draft_nodes"] > 0


def test_without_its_reference_a_decoder_is_compared_with_nothing(run: Run) -> None:
    assert {row["identical"] for row in lines(run("--decoders", "ptd", "--json"))} == {None}


def test_it_goes_on_where_it_stopped(run: Run, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    first = lines(run("--decoders", "ar", "--rows", "2", "--records", str(records), "--json"))
    assert len(records.read_text().splitlines()) == 2
    kept = records.read_text()
    whole = lines(run("--decoders", "ar,ptd", "--records", str(records), "--json"))
    assert records.read_text().startswith(kept)
    assert len(records.read_text().splitlines()) == 8
    assert first[-1]["rows"] == 2
    assert [row["rows"] for row in whole if row["category"] == "all"] == [4, 4]
    drawn = CliRunner().invoke(main, ["--from", str(records), "--json"])
    assert lines(drawn) == whole


def test_plots_are_drawn(run: Run, tmp_path: Path) -> None:
    result = run("--decoders", "ar,ptd,ptd:width=2,ptd:depth=3", "--plot", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    for name in ("decoders.png", "ptd_sweep.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_settings_belong_to_a_decoder() -> None:
    assert parse("ptd:width=2:depth=3").settings == (("width", 2), ("depth", 3))
    assert parse("apar+lade:window=3").compared_with == "apar"
    for spelled in ("ptd:window=3", "ar:width=2", "ptd:width=x", "ptd:width"):
        with pytest.raises(DecodingError, match="is no setting of"):
            parse(spelled)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--decoders", "eagle"], "decoder is 'eagle': use one of ar, apar"),
        (["--decoders", "medusa"], "needs trained heads"),
        (["--decoders", "ptd:width=0"], "width is 0: use a whole number, at least 1"),
        (["--decoders", "ar", "--shape", "smollm2"], "name one of --model and --shape"),
    ],
)
def test_what_cannot_run_is_one_line(run: Run, args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code != 0
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_files_that_cannot_be_read_are_one_line(run: Run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "other.parquet")
    assert "has no column prompt or messages: it has text" in run(source=str(tmp_path / "other.parquet")).stderr
    assert "is no Parquet file, and no set of ours (maths, code)" in run(source="history").stderr
    assert "is no folder and no model of the service" in run(model="no-such-model").stderr


def test_random_weights_and_costs(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(
        '{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, '
        '"num_key_value_heads": 1, "vocab_size": 200}'
    )
    costs = CliRunner().invoke(main, ["--shape", str(shape), "--costs", "0,4,16", "--json"])
    assert [row["nodes"] for row in lines(costs)] == [0, 4, 16]
    assert lines(costs)[0]["relative"] == 1.0
    timed = CliRunner().invoke(main, ["--shape", str(shape), "--decoders", "ar,ptd", "--max-tokens", "20", "--json"])
    assert {row["identical"] for row in lines(timed)} == {True}
    refused = CliRunner().invoke(main, ["--shape", "nothing", "--costs", "0"])
    assert "shape is 'nothing': use smollm2, vicuna-7b, vicuna-13b, or a model's config.json" in refused.stderr


def test_it_runs_where_neither_vllm_nor_the_service_is_installed(tiny_folder: Path) -> None:
    blocker = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('vllm', 'jobs', 'worker', 'db', 'api', 'sqlalchemy', 'celery'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from benchmarks.decoders import main\n"
        "main()\n"
    )
    args = ["--model", str(tiny_folder), "--prompts", "maths", "--rows", "1", "--max-tokens", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", blocker, *args, "--decoders", "ar,apar+ptd"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["tokens"] == 8


@pytest.mark.parametrize("name", SETS)
def test_our_own_prompts_are_fifty_different_ones(name: str) -> None:
    lines = (REPOSITORY / "benchmarks" / "decoding" / f"{name}.txt").read_text("utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 50


def test_rows_are_spread_over_categories() -> None:
    prompts = [Prompt(number, "ab"[number >= 5], [1]) for number in range(10)]
    assert [prompt.number for prompt in spread(prompts, 4)] == [0, 1, 5, 6]
    assert spread(prompts, None) == prompts
