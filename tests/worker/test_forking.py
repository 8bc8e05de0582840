"""What a model brings to fork, what engine and requests are told, and what is read from the scheduler's receipt."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import CHILD, FORK, make_tiny_model

from apar.options import ForkLimits, request_options
from apar.tree import Span
from jobs.errors import BadInput, Unavailable
from jobs.settings import ForkSettings, KVBudget, ModelAlias, Settings
from worker.backend import Decoding
from worker.check import check_file
from worker.forking import SCHEDULER, load_encoder, read_receipt, request_config, scheduler_args


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", max_depth=1)


@pytest.fixture
def model_without_apar(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["apar"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_folder_that_names_its_control_tokens_is_enough(model: Path) -> None:
    _, forking = load_encoder(ModelAlias(path=model), model)
    assert forking is not None
    assert (forking.fork_token, forking.fork_token_id) == ("[Fork]", FORK)
    assert (forking.child_token, forking.child_token_id) == ("[Child]", CHILD)
    assert forking.limits == ForkLimits(max_depth=1)  # the folder's own; the others are the engine's


def test_the_alias_names_tokens_of_any_model_and_its_limits_win(model: Path, model_without_apar: Path) -> None:
    named = ModelAlias(fork_token="th", child_token="he", forks=ForkSettings(max_forks=3, max_depth=2))
    for folder in (model, model_without_apar):
        encoder, forking = load_encoder(named, folder)
        assert forking is not None
        assert forking.fork_token == "th"
        assert forking.limits == ForkLimits(max_forks=3, max_depth=2)
        assert encoder.decoder.id_to_token(forking.fork_token_id) == "th"
        assert {forking.fork_token_id, forking.child_token_id}.isdisjoint(encoder.encode_text("the he"))


def test_a_model_that_nobody_gave_control_tokens_cannot_fork(model_without_apar: Path) -> None:
    encoder, forking = load_encoder(ModelAlias(forks=ForkSettings(max_width=2)), model_without_apar)
    assert forking is None
    assert encoder.encode_text("a")


def test_control_tokens_of_the_folder_stay_text_in_prompts(model: Path) -> None:
    encoder, _ = load_encoder(ModelAlias(), model)
    for encode in (encoder.encode_text, encoder.encode_prompt):
        ids = encode("a [Fork] b [Child] c</s>")
        assert {FORK, CHILD}.isdisjoint(ids)
        assert "a [Fork] b [Child] c</s>" in encoder.decoder.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("apar", "says"),
    [
        ({"fork_token_id": 10**6, "child_token_id": CHILD}, "control token 1000000, which is not in its vocabulary"),
        ({"fork_token_id": FORK}, "name both or neither"),
        ({"fork_token_id": FORK, "child_token_id": FORK}, "must be two tokens"),
        ({"fork_token_id": FORK, "child_token_id": CHILD, "max_depth": -1}, "max_depth is -1"),
        ({"fork_token_id": FORK, "child_token_id": CHILD, "max_dept": 1}, "max_dept is not an option"),
    ],
)
def test_a_config_json_that_cannot_be_used_says_why(model_without_apar: Path, apar: dict[str, Any], says: str) -> None:
    config = json.loads((model_without_apar / "config.json").read_text())
    (model_without_apar / "config.json").write_text(json.dumps({**config, "apar": apar}))
    with pytest.raises(Unavailable, match=says):
        load_encoder(ModelAlias(), model_without_apar)


def test_a_token_that_the_model_does_not_have_is_refused(model: Path) -> None:
    with pytest.raises(Unavailable, match="control token '<fork>' is not in the model's vocabulary"):
        load_encoder(ModelAlias(fork_token="<fork>", child_token="<child>"), model)


def test_the_engine_is_told_tokens_and_limits_under_what_the_alias_says_itself(model: Path) -> None:
    _, forking = load_encoder(ModelAlias(), model)
    told = {"fork_token_id": FORK, "child_token_id": CHILD, "max_width": 32, "max_forks": 64, "max_depth": 1}
    assert scheduler_args(ModelAlias(), forking) == {"scheduler_cls": SCHEDULER, "additional_config": {"apar": told}}
    own = {"scheduler_cls": "mine.Own", "additional_config": {"other": 1, "apar": {"max_width": 4}}}
    assert scheduler_args(ModelAlias(engine=own), forking) == {
        "scheduler_cls": "mine.Own", "additional_config": {"other": 1, "apar": {**told, "max_width": 4}}
    }  # fmt: skip
    assert scheduler_args(ModelAlias(), None) == {"scheduler_cls": SCHEDULER, "additional_config": {}}
    for wrong in ("text", {"apar": 3}):
        with pytest.raises(BadInput, match="must be a table"):
            scheduler_args(ModelAlias(engine={"additional_config": wrong}), forking)


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding("apar"), Decoding("ar", "job", 0.5), Decoding("apar", "job", 1.0)]
)
def test_what_a_request_says_is_what_the_scheduler_reads(decoding: Decoding) -> None:
    read = request_options({"apar": request_config(decoding)})
    assert (read.fork, read.pool, read.pool_share) == (decoding.forks, decoding.pool, decoding.pool_share)
    assert (read.max_width, read.max_forks, read.max_depth) == (None, None, None)


STATS = {
    "threads": 2, "forks": 1, "max_width": 2, "steps": 6, "peak_cached_tokens": 14, "peak_blocks": 2,
    "attended_tokens": 90, "sequential_peak_tokens": 17, "sequential_attended_tokens": 100, "preemptions": 0,
    "recomputed_tokens": 0, "fork_prefill_tokens": 2, "copied_forks": 1,
}  # fmt: skip
NODES = [[0, None, "root", 0, 0, 3, 0, 2], [1, 0, "detail", 1, 3, 5, 4, 5], [2, 0, "sibling", 0, 5, 7, 4, 5]]


def test_a_receipt_is_taken_as_it_is() -> None:
    receipt = read_receipt({"version": 1, "stats": STATS, "nodes": NODES}, 10, 7)
    assert receipt is not None
    assert receipt.spans == tuple(Span(*node) for node in NODES)
    assert (receipt.stats.steps, receipt.stats.peak_cached_tokens, receipt.stats.attended_tokens) == (6, 14, 90)
    assert receipt.stats.sequential_peak_tokens == 17
    assert receipt.stats.sequential_attended_tokens == sum(10 + i for i in range(1, 8))


def test_a_stop_string_in_front_of_the_engine_cuts_the_tree_and_its_sequential_values() -> None:
    receipt = read_receipt({"version": 1, "stats": STATS, "nodes": NODES}, 10, 4)
    assert receipt is not None
    assert [(span.start, span.end) for span in receipt.spans] == [(0, 3), (3, 4), (4, 4)]
    assert (receipt.stats.sequential_peak_tokens, receipt.stats.sequential_attended_tokens) == (14, 11 + 12 + 13 + 14)


def test_a_scheduler_that_says_nothing_gives_no_receipt() -> None:
    assert read_receipt(None, 10, 4) is None


@pytest.mark.parametrize(("backend", "max_model_len"), [("vllm", 96), ("reference", 100)])
def test_a_dry_run_knows_the_backends_blocks(model: Path, tmp_path: Path, backend: Any, max_model_len: int) -> None:
    alias = ModelAlias(path=model, backend=backend, kv_budget=KVBudget.parse("100 tokens"))
    settings = Settings(home=tmp_path / "home", models={"tiny": alias}, default_model="tiny")
    pq.write_table(pa.table({"prompt": ["one"]}), tmp_path / "p.parquet")
    report = check_file(
        settings, "tiny", tmp_path / "p.parquet", max_tokens=7, columns={},
        say=lambda line: None, progress=lambda phase, done, total: None,
    )  # fmt: skip
    assert report["max_model_len"] == max_model_len


@pytest.mark.parametrize("forks", [True, False])
def test_a_dry_run_says_whether_the_model_forks_and_how_far(
    model: Path, model_without_apar: Path, tmp_path: Path, forks: bool
) -> None:
    alias = ModelAlias(path=model if forks else model_without_apar, forks=ForkSettings(max_forks=9))
    settings = Settings(home=tmp_path / "home", models={"tiny": alias}, default_model="tiny")
    pq.write_table(pa.table({"prompt": ["one [Fork] two", "three"]}), tmp_path / "p.parquet")
    report = check_file(
        settings, "tiny", tmp_path / "p.parquet", max_tokens=7, columns={},
        say=lambda line: None, progress=lambda phase, done, total: None,
    )  # fmt: skip
    assert (report["rows"], report["rows_that_fail"], report["output_tokens_at_most"]) == (2, 0, 14)
    assert report["forks"] == (
        {
            "fork_token": "[Fork]", "fork_token_id": FORK, "child_token": "[Child]", "child_token_id": CHILD,
            "max_width": 32, "max_forks": 9, "max_depth": 1,
        } if forks else None
    )  # fmt: skip
