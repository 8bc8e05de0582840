"""Training Medusa heads: they learn what can be known, from trees where the base forks, and a stop changes nothing."""

import json
import os
import signal
import string
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from synthetic_trees import list_row, made_up_rows, make_base, plain_row, write_rows
from tiny_models import CHILD, FORK, make_tiny_model

from apar.decoding.medusa_heads import load_heads
from apar.decoding.medusa_training import data
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.decoding.medusa_training.run import MedusaTrainingResult, train_heads
from apar.errors import InputError
from apar.training.loop import Event
from apar.training.medusa_cli import train_medusa

LETTERS = "bcdfgjkmpqvwxz"
"""Of which the tokenizer joins no two."""


def alphabet(start: int, length: int) -> str:
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(length))


def knowable_rows(count: int) -> list[dict[str, Any]]:
    """Answers that recite the letters, from anywhere: each token says all that follow, but for where it ends."""
    random = Random(0)
    return [
        plain_row(f"{string.ascii_uppercase[i % 26]}{i}", alphabet(random.randrange(14), random.randint(20, 30)))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa_runs")
    make_base(folder / "base")
    make_tiny_model(folder / "forking")
    write_rows(folder / "knowable.parquet", knowable_rows(60))
    write_rows(folder / "trees.parquet", made_up_rows(40))
    pq.write_table(
        pa.table({"prompt": ["a", "b", "c"], "answer": ["some text", "more text", ""]}), folder / "plain.parquet"
    )
    return folder


def options(files: Path, out: Path, **more: Any) -> MedusaTrainingOptions:
    defaults: dict[str, Any] = {
        "base": files / "base", "data": files / "trees.parquet", "steps": 8, "batch_size": 4, "row_tokens": 256,
        "lr": 1e-2, "dtype": "fp32", "eval_share": 0.1, "eval_every": 4, "save_every": 3,
    }  # fmt: skip
    return MedusaTrainingOptions(out=out, **{**defaults, **more})


def lines(result: MedusaTrainingResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.out / "log.jsonl").read_text().splitlines()]


def test_heads_learn_what_can_be_known(files: Path, tmp_path: Path) -> None:
    knowable = files / "knowable.parquet"
    result = train_heads(options(files, tmp_path, data=knowable, steps=60, batch_size=8, heads=3))
    assert result.finished
    steps = [line["losses"] for line in lines(result) if "losses" in line]
    held_out = [line["held_out"] for line in lines(result) if "held_out" in line]
    for head in range(3):
        assert steps[-1][head] < 0.3 * steps[0][head]
        before, after = held_out[0][head], held_out[-1][head]
        assert before["top1"] < 0.2  # untrained, it guesses the token before the right one, if any
        assert after["top1"] > 0.6  # nobody knows where an answer begins and ends
        assert after["top5"] >= after["top1"]
    assert result.held_out == held_out[-1]
    assert (tmp_path / "loss.png").stat().st_size > 1000
    base = files / "base" / "config.json"
    heads = load_heads(tmp_path / "heads")
    assert (heads.num_heads, heads.num_layers) == (3, 2)
    assert heads.vocab_size == json.loads(base.read_text())["vocab_size"]


def test_a_base_that_forks_has_its_heads_learn_from_trees(files: Path, tmp_path: Path) -> None:
    forking = train_heads(options(files, tmp_path / "forking", base=files / "forking"))
    assert forking.figures["trees"] > 10
    plain = train_heads(options(files, tmp_path / "plain"))
    assert plain.figures["trees"] == 0
    assert plain.figures["answers"] == forking.figures["answers"]


def test_control_tokens_are_the_bases_own(files: Path) -> None:
    vocabulary, forks = data.vocabulary_of(files / "forking")
    assert forks
    assert (vocabulary.control.fork, vocabulary.control.child) == (FORK, CHILD)
    assert vocabulary.new_texts == []
    found = data.load(options(files, files, base=files / "forking"), vocabulary, forks=True)
    tree = next(tree for tree in found.learned if tree.is_structured)
    assert (tree.token_ids == FORK).sum() == (tree.token_ids == CHILD).sum() == (len(tree.parents) - 1) / 2
    assert data.vocabulary_of(files / "base")[1] is False


def test_a_cut_answer_does_not_teach_where_to_end(files: Path, tmp_path: Path) -> None:
    vocabulary, _ = data.vocabulary_of(files / "base")
    eos = vocabulary.eos_token_id
    for column in ("finish_reason", "forq_finish_reason"):
        table = pa.table({"prompt": ["a", "b"], "response": ["bcd", "bcd"], column: ["length", "stop"]})
        pq.write_table(table, tmp_path / "cut.parquet")
        found = data.load(
            options(files, tmp_path, data=tmp_path / "cut.parquet", eval_share=0), vocabulary, forks=False
        )
        assert sorted(tree.labels.tolist().count(eos) for tree in found.learned) == [0, 1]


def test_no_answer_to_a_held_out_prompt_is_learned_from(files: Path, tmp_path: Path) -> None:
    rows = [row for i in range(20) for row in (plain_row(f"p{i}", "bcd"), list_row(f"p{i}", ["b"] * 3, ["cd"] * 3))]
    write_rows(tmp_path / "twice.parquet", rows)
    vocabulary, _ = data.vocabulary_of(files / "forking")
    found = data.load(options(files, tmp_path, data=tmp_path / "twice.parquet"), vocabulary, forks=True)
    assert len(found.held_out) == 4
    prompts = [
        {vocabulary.tokenizer.decode(tree.token_ids).split("\n")[0] for tree in part}
        for part in (found.held_out, found.learned)
    ]
    assert [len(part) for part in prompts] == [2, 18]
    assert not prompts[0] & prompts[1]


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_to_the_bit(files: Path, tmp_path: Path) -> None:
    whole = train_heads(options(files, tmp_path / "whole"))

    def stop(event: Event) -> None:
        if event.step == 5 and not event.text:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = train_heads(options(files, tmp_path / "stopped"), stop)
    assert (stopped.finished, stopped.step, stopped.heads) == (False, 5, None)
    resumed = train_heads(options(files, tmp_path / "stopped"))
    assert resumed.finished
    figures = [
        [(line["step"], line.get("losses"), line.get("held_out")) for line in lines(r)] for r in (whole, resumed)
    ]
    assert figures[0] == figures[1]
    weights = [(r.out / "heads" / "medusa_lm_head.safetensors").read_bytes() for r in (whole, resumed)]
    assert weights[0] == weights[1]
    again = train_heads(options(files, tmp_path / "stopped"))  # done already
    assert again.heads == resumed.heads
    with pytest.raises(InputError, match="--heads was 2, and is 3 now"):
        train_heads(options(files, tmp_path / "stopped", heads=3))


def test_the_base_is_left_as_it_is(files: Path, tmp_path: Path) -> None:
    before = (files / "base" / "model.safetensors").read_bytes()
    result = train_heads(options(files, tmp_path))
    assert (files / "base" / "model.safetensors").read_bytes() == before
    assert result.heads is not None
    assert sorted(path.name for path in result.heads.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]


def test_bfloat16_learns_as_float32_does(files: Path, tmp_path: Path) -> None:
    runs = [train_heads(options(files, tmp_path / dtype, dtype=dtype, lr=1e-3)) for dtype in ("fp32", "bf16")]
    (exact, rough) = (torch.tensor([line["loss"] for line in lines(run) if "loss" in line]) for run in runs)
    assert exact[-1] < exact[0]
    torch.testing.assert_close(exact, rough, rtol=0.03, atol=0.03)


# --- the command ---


def command(files: Path, out: Path, **options: Any) -> Result:
    given = {
        "base": files / "base", "data": files / "trees.parquet", "out": out, "steps": 2, "batch_size": 2,
        "row_tokens": 256, "dtype": "fp32", **options,
    }  # fmt: skip
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(train_medusa, [*arguments, "--json"])


def test_the_command_trains_and_prints_its_result(files: Path, tmp_path: Path) -> None:
    result = command(files, tmp_path / "out")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["finished"]
    assert Path(printed["heads"], "config.json").is_file()
    assert "head 2: loss" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "nowhere"}, "nowhere is no model folder: it has no config.json"),
        ({"data": "nowhere.parquet"}, "nowhere.parquet does not exist"),
        ({"data": "config"}, "is no Parquet file"),
        ({"data": "plain"}, "has no column response: give --response-column, one of prompt, answer"),
        ({"data": "plain", "response_column": "answer"}, "--batch-size is 2, and there are 1 answers"),
        ({"heads": 0}, "--heads is 0: use at least 1"),
        ({"lr": 0}, "--lr is 0.0: use a number above 0"),
        ({"warmup": 2}, "--warmup is 2.0: use 0 to 1"),
        ({"row_tokens": 4096}, "has 512 positions, answers have up to 4096 tokens: give --max-tokens 512"),
        ({"max_tokens": 300}, "--max-tokens is 300, a row holds 256 tokens"),
        ({"max_tokens": 8}, "has no answer to learn from (40 longer than 8 tokens left out)"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    places = {"plain": files / "plain.parquet", "config": files / "base" / "config.json"}
    result = command(files, tmp_path / "out", **{k: places.get(str(v), v) for k, v in options.items()})
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
