"""Whole runs on a tiny model: what they write, that they learn, and that stopping changes nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_trees import made_up_rows, make_base, plain_row, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar.errors import AparError, InputError
from apar.training import checkpoints
from apar.training.adapter import merge
from apar.training.loop import Event, learning_rate
from apar.training.model import TrainedModel
from apar.training.options import TrainingOptions
from apar.training.run import TrainingResult, train
from apar.training.vocabulary import Vocabulary

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_base(folder / "base")
    make_base(folder / "tied", tied=True)
    write_rows(folder / "data.parquet", made_up_rows(40))
    return folder


def options(files: Path, out: Path, **more: Any) -> TrainingOptions:
    defaults: dict[str, Any] = {
        "base": files / "base", "data": files / "data.parquet", "steps": 8, "batch_size": 4, "row_tokens": 256,
        "lr": 1e-3, "dtype": "fp32", "eval_share": 0.1, "eval_every": 4, "save_every": 3, "lora_rank": 4,
    }  # fmt: skip
    return TrainingOptions(out=out, **{**defaults, **more})


def losses(result: TrainingResult) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (result.out / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def assert_same_run(one: TrainingResult, other: TrainingResult) -> None:
    """Losses, weights, optimizer state and the model's file, to the bit."""
    assert losses(one) == losses(other)
    found = [checkpoints.latest(result.out / "checkpoints") for result in (one, other)]
    assert found[0] is not None
    assert found[1] is not None
    (step, first), (other_step, second) = found
    assert step == other_step == one.steps
    assert first["weights"].keys() == second["weights"].keys()
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name]), name
    for number, state in first["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, second["optimizer"]["state"][number][name])
    models = [(result.model / "model.safetensors").read_bytes() for result in (one, other) if result.model]
    assert models[0] == models[1]


@pytest.mark.parametrize(("method", "distill"), [("full", 0.0), ("lora", 0.0), ("full", 1.0), ("lora", 0.5)])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_to_the_bit(
    files: Path, tmp_path: Path, method: str, distill: float
) -> None:
    told: dict[str, Any] = {"method": method, "distill": distill}
    whole = train(options(files, tmp_path / "whole", **told))
    assert whole.finished

    def stop(at: int) -> Any:
        def report(event: Event) -> None:
            if event.step == at and not event.text:
                os.kill(os.getpid(), signal.SIGINT)

        return report

    handler = signal.getsignal(signal.SIGINT)
    for at in (2, 5):
        stopped = train(options(files, tmp_path / "parts", **told), stop(at))
        assert (stopped.finished, stopped.step, stopped.model) == (False, at, None)
        assert signal.getsignal(signal.SIGINT) is handler
    assert_same_run(whole, train(options(files, tmp_path / "parts", **told)))


KILLED = """
import os, signal, sys
import torch
from pathlib import Path
from apar.training.options import TrainingOptions
from apar.training.run import train
torch.set_num_threads(1)
save, saved = torch.save, []
def killing(state, path):
    saved.append(path)
    save(state, path)
    if len(saved) == 2:
        with open(path, "r+b") as file:
            file.truncate(1000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killing
files = Path(sys.argv[1])
train(TrainingOptions(base=files / "base", data=files / "data.parquet", out=Path(sys.argv[2]), steps=8, batch_size=4,
    row_tokens=256, lr=1e-3, dtype="fp32", eval_share=0.1, eval_every=4, save_every=3, lora_rank=4, method="lora"))
"""


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(files: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", KILLED, files, tmp_path / "parts"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    found = checkpoints.latest(tmp_path / "parts" / "checkpoints")
    assert found is not None
    assert found[0] == 3  # step 6 was being written
    resumed = train(options(files, tmp_path / "parts", method="lora"))
    assert_same_run(train(options(files, tmp_path / "whole", method="lora")), resumed)
    assert not [path for path in (tmp_path / "parts" / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        checkpoints.save(tmp_path, step, {"weights": torch.ones(step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]
    (tmp_path / "step-00000009" / "state.pt").write_bytes(b"torn")
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found[0] == 6


def test_a_run_with_other_options_is_refused_naming_the_difference(files: Path, tmp_path: Path) -> None:
    train(options(files, tmp_path / "run", steps=1))
    with pytest.raises(InputError, match=r"--lr was 0.001, and is 0.002 now"):
        train(options(files, tmp_path / "run", steps=1, lr=2e-3))
    write_rows(files / "other.parquet", made_up_rows(10, seed=5))
    with pytest.raises(InputError, match="--data holds something else"):
        train(options(files, tmp_path / "run", steps=1, data=files / "other.parquet"))
    again = train(options(files, tmp_path / "run", steps=1, save_every=7))  # changes nothing about the training
    assert again.finished


def test_two_runs_in_one_folder_are_refused(files: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(AparError, match="another process is training"):
        train(options(files, tmp_path / "run"))


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("base", ["base", "tied"])
def test_it_learns_where_to_fork(files: Path, tmp_path: Path, method: str, base: str) -> None:
    result = train(
        options(
            files,
            tmp_path,
            base=files / base,
            method=method,
            steps=60,
            lr=5e-3,
            row_lr=2e-2,
            eval_every=60,
            batch_size=6,
        )
    )
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    before, after = (line["held_out"] for line in lines if "held_out" in line)
    assert before["fork_due"] < 0.05
    assert after["fork_due"] > 0.5
    assert after["fork_not_due"] < 0.05
    assert after["loss"] < before["loss"]
    assert result.held_out == after
    assert result.figures["path_tokens"] > result.figures["tree_tokens"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("base", ["base", "tied"])
def test_the_merged_model_computes_what_the_adapter_computed(files: Path, tmp_path: Path, base: str) -> None:
    told = options(files, tmp_path / "run", base=files / base, method="lora", steps=3)
    result = train(told)
    assert result.model is not None
    assert result.adapter is not None
    vocabulary = Vocabulary(told.base)
    unmerged = TrainedModel(told, vocabulary, torch.device("cpu"))
    found = checkpoints.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    start = {name: tensor.clone() for name, tensor in unmerged.state().items()}
    unmerged.load_state(found[1]["weights"])
    rows = [name for name in start if "trainable_tokens_delta" in name]
    assert len(rows) == (1 if base == "tied" else 2)
    assert all((start[name] - unmerged.state()[name]).abs().min() > 0 for name in rows)

    merged = AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float32).eval()
    control = vocabulary.control
    ids = torch.tensor([[9, 20, control.fork, control.child, 30, control.fork, 41]])
    from apar.training.packing import Row
    from apar.training.sequences import AnswerNode, linearise

    row = Row([linearise(ids[0].tolist(), [AnswerNode([])], control, 1)])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits[0], unmerged.logits(row), atol=1e-4, rtol=0)
    config = json.loads((result.model / "config.json").read_text())
    assert config["apar"] == {"fork_token_id": control.fork, "child_token_id": control.child, "max_depth": 1}
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert tokenizer.convert_tokens_to_ids(["<|fork|>", "<|child|>"]) == [control.fork, control.child]
    assert tokenizer.chat_template

    for name in ("one", "two"):
        merge(told.base, result.adapter, tmp_path / name)
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_merging_refuses_what_is_no_adapter_of_ours(files: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no adapter of `forq train`"):
        merge(files / "base", tmp_path, tmp_path / "out")


def test_bfloat16_trains_too_and_keeps_the_bases_type(tmp_path: Path) -> None:
    make_base(tmp_path / "base", tied=True, dtype="bfloat16")
    write_rows(tmp_path / "data.parquet", made_up_rows(20))
    for method in ("full", "lora"):
        result = train(options(tmp_path, tmp_path / method, method=method, dtype="bf16", steps=2))
        assert result.model is not None
        assert AutoModelForCausalLM.from_pretrained(result.model).dtype == torch.bfloat16


def test_accumulating_rows_changes_nothing_but_rounding(files: Path, tmp_path: Path) -> None:
    one = train(options(files, tmp_path / "one", row_tokens=512, max_tokens=200, steps=3))
    many = train(options(files, tmp_path / "many", row_tokens=200, max_tokens=200, steps=3))
    for (_, loss, norm), (_, other, other_norm) in zip(losses(one), losses(many), strict=True):
        assert loss == pytest.approx(other, rel=1e-4)
        assert norm == pytest.approx(other_norm, rel=1e-3)


def test_control_rows_inside_a_whole_matrix_move_at_their_own_rate(files: Path, tmp_path: Path) -> None:
    told = options(files, tmp_path, method="full", lr=1e-3, row_lr=1e-2)
    vocabulary = Vocabulary(told.base)
    model = TrainedModel(told, vocabulary, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.groups(told.lr, 0.0), lr=told.lr)
    weight = model.state()["model.embed_tokens.weight"]
    before = weight.clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.update(optimizer)
    moved = (before - weight).mean(1)
    torch.testing.assert_close(moved[5:9], torch.full((4,), 1e-3), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        moved[[vocabulary.control.fork, vocabulary.control.child]], torch.full((2,), 1e-2), rtol=1e-3, atol=0
    )


def test_two_processes_share_a_batch_and_learn_the_same(files: Path, tmp_path: Path) -> None:
    alone = train(options(files, tmp_path / "alone", method="lora", row_tokens=128, steps=3))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29617", "-m",
        "apar.training.cli", "--base", files / "base", "--data", files / "data.parquet", "--out", tmp_path / "two",
        "--method", "lora", "--steps", "3", "--batch-size", "4", "--row-tokens", "128", "--lr", "1e-3", "--dtype",
        "fp32", "--eval-share", "0.1", "--eval-every", "4", "--save-every", "3", "--lora-rank", "4",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    shared = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    for (_, loss, norm), (other, other_norm) in zip(losses(alone), shared, strict=True):
        assert loss == pytest.approx(other, rel=1e-4)
        assert norm == pytest.approx(other_norm, rel=1e-3)


def test_the_rate_rises_then_falls_along_a_cosine() -> None:
    rates = [learning_rate(step, 100, 0.03) for step in range(100)]
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 <= rates[-1] < 0.001
    assert learning_rate(0, 1, 0.0) == 1.0


def test_a_sort_of_answers_that_is_missing_is_named(files: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "plain.parquet", [plain_row(f"say {i}", "the thing.") for i in range(6)])
    with pytest.raises(InputError, match="no structured answer"):
        train(options(files, tmp_path / "run", data=tmp_path / "plain.parquet"))
    with pytest.raises(InputError, match=r"no answer to learn from \(6 longer than 8 tokens left out\)"):
        train(options(files, tmp_path / "run2", data=tmp_path / "plain.parquet", max_tokens=8))
