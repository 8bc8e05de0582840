"""`forq bootstrap` from answers that exist, with a tiny base model: trees, training, report, and taking up again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tiny_models import make_tiny_model

from jobs.errors import BadInput
from jobs.settings import get_settings
from worker.bootstrap.recipe import read_recipe
from worker.bootstrap.record import Record
from worker.bootstrap_cli import bootstrap

pytestmark = pytest.mark.timeout(600)

LIST = "Here are ideas:\n" + "\n".join(f"{n}. Idea {n}: this is what number {n} would mean." for n in range(1, 5))
RECIPE = """
[answers]
min_words = 5
[training]
method = "lora"
steps = 2
batch_size = 2
row_tokens = 512
dtype = "fp32"
lora_rank = 2
eval_share = 0.0
[report]
rows = 3
max_tokens = 24
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tiny base model that does not fork, prompts and answers."""
    home = tmp_path_factory.mktemp("bootstrap")
    model = make_tiny_model(home / "model")
    config = json.loads((model / "config.json").read_text())
    del config["apar"]
    (model / "config.json").write_text(json.dumps(config))
    (home / "forq.toml").write_text(
        f'default_model = "tiny"\n[models.tiny]\npath = "{model}"\ndtype = "float32"\nkv_budget = "64 blocks"\n'
        "max_model_len = 512\n"
    )
    (home / "recipe.toml").write_text(RECIPE)
    # Questions 0, 5 and 10 are held out for the report, and with them the first answer of each five.
    prompts = [f"Question {n}?" for n in range(15)]
    pq.write_table(pa.table({"prompt": prompts, "category": ["a", "b", "c"] * 5}), home / "prompts.parquet")
    texts = [LIST, "No ideas today.", LIST + "\n5. Idea 5: this is what num", None, LIST.replace("Idea", "Thought")] * 3
    reasons = ["stop", "stop", "length", None, "stop"] * 3
    answers = {"prompt": prompts, "forq_output": texts, "forq_finish_reason": reasons}
    pq.write_table(pa.table(answers), home / "answers.parquet")
    return home


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FORQ_HOME", str(made))
    get_settings.cache_clear()
    yield made
    get_settings.cache_clear()


def invoke(home: Path, out: Path, *more: str, answers: str | None = "answers.parquet") -> Any:
    arguments = ["--base", "tiny", "--prompts", str(home / "prompts.parquet"), "--out", str(out)]
    arguments += ["--recipe", str(home / "recipe.toml"), "--json", *more]
    if answers is not None:
        arguments += ["--answers", str(home / answers)]
    return CliRunner().invoke(bootstrap, arguments)


@pytest.mark.engine
def test_a_run_makes_a_model_and_a_report_and_is_not_done_twice(home: Path) -> None:
    out = home / "run"
    first = invoke(home, out)
    assert first.exit_code == 0, first.output + str(first.exception)
    stages = json.loads(first.stdout.splitlines()[-1])
    assert stages["split"] == {"prompts": 12, "report_prompts": 3}
    assert {name: stages["selection"][name] for name in ("kept", "complete", "failed")} == {
        "kept": 9, "complete": 6, "failed": 3,
    }  # fmt: skip
    assert (stages["trees"]["structured"], stages["trees"]["unstructured"]) == (6, 3)
    assert stages["training"]["steps"] == 2
    config = json.loads((out / "training" / "model" / "config.json").read_text())
    assert config["apar"]["fork_token_id"] != config["apar"]["child_token_id"]
    assert (out / "training" / "adapter" / "apar.json").is_file()
    report = json.loads((out / "report" / "report.json").read_text())
    assert report["categories"][-1]["answers"] == 3

    again = invoke(home, out)
    assert again.exit_code == 0
    assert again.stderr.count("done before") == 6


def test_a_stage_that_failed_is_taken_up_and_those_before_it_are_not_done_again(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    plain = home / "plain.parquet"
    pq.write_table(
        pa.table({"prompt": ["Question 1?"], "forq_output": ["Plain."], "forq_finish_reason": ["stop"]}), plain
    )
    result = invoke(home, out, answers=plain.name)
    assert isinstance(result.exception, BadInput)
    assert "none of 1 answers has a structure that forks enough" in str(result.exception)
    assert invoke(home, out, answers=plain.name).stderr.count("done before") == 3


def test_a_folder_of_another_run_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert "is not empty and holds no bootstrap.json" in str(invoke(home, tmp_path / "other").exception)


def test_other_options_for_the_same_folder_are_refused(home: Path, tmp_path: Path) -> None:
    Record(tmp_path / "run", {"base": "tiny", "recipe": 1})
    with pytest.raises(BadInput, match="holds a run with recipe = 1, now it is 2"):
        Record(tmp_path / "run", {"base": "tiny", "recipe": 2})
    Record(tmp_path / "other", {"prompts": "a digest"})
    with pytest.raises(BadInput, match="holds a run with other contents of --prompts"):
        Record(tmp_path / "other", {"prompts": "another one"})


def test_trees_that_save_too_little_are_left_out(home: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + "[trees]\nmax_attended_share = 0.1\n")
    result = invoke(home, tmp_path / "run", "--recipe", str(tmp_path / "recipe.toml"))
    assert isinstance(result.exception, BadInput)
    assert "none of 9 answers has a structure that forks enough" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[answers]\nmax_tokens = 'many'", "answers.max_tokens"),
        ("[training]\nlearning = 1", "no option 'learning'"),
        ("[training]\nlr = -1", "lr is -1"),
        ("[trees]\nrules = 'mine'", "trees.rules"),
        ("surprise = 1", "surprise"),
        ("= 1", "cannot be read"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=fault) as refused:
        read_recipe(path).training_options(tmp_path, tmp_path, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"--prompts": "missing.parquet"}, "missing.parquet"),
        ({"--base": "nobody"}, "'nobody' is not configured"),
        ({"--answers": "prompts.parquet"}, "forq_output"),
        ({"--prompt-column": "question"}, "question"),
    ],
)
def test_bad_input_is_refused_in_one_line(home: Path, tmp_path: Path, change: dict[str, str], fault: str) -> None:
    more = [part for flag, value in change.items() for part in (flag, str(home / value) if "." in value else value)]
    result = invoke(home, tmp_path / "run", *more, answers=None if "--answers" in change else "answers.parquet")
    assert isinstance(result.exception, BadInput), result.output + str(result.exception)
    assert fault in str(result.exception)
    assert "\n" not in str(result.exception)
