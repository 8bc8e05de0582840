"""`forq bootstrap` starts the service it needs, asks the base model through it, and stops it again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from service import CONFIGURATION, UP_S, Service
from tiny_models import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "tiny"
RECIPE = """
[answers]
max_tokens = 40
[training]
method = "lora"
steps = 1
batch_size = 1
dtype = "fp32"
lora_rank = 1
"""


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Service]:
    """A home with a tiny base model; nothing runs yet."""
    model = make_tiny_model(tmp_path / "model")
    alias = CONFIGURATION.format(model=MODEL, path=model).replace(
        "default_max_tokens", 'dtype = "float32"\ndefault_max_tokens'
    )
    service = Service(tmp_path / "home", f'default_model = "{MODEL}"\n{alias}')
    (service.work / "recipe.toml").write_text(RECIPE)
    service.write("prompts.parquet", {"prompt": [f"Tell me about number {n}." for n in range(12)]})
    yield service
    service.clean_up()


def test_the_base_answers_through_a_service_of_the_commands_own_and_once(idle: Service) -> None:
    out = idle.work / "run"
    command = ("bootstrap", "--base", MODEL, "--prompts", idle.work / "prompts.parquet", "--out", out,
               "--recipe", idle.work / "recipe.toml")  # fmt: skip
    first = idle.forq(*command, timeout_s=UP_S)
    answers = pq.read_table(out / "answers.parquet")
    assert answers.num_rows == 10  # two of the prompts are for the report
    assert answers["forq_finish_reason"].null_count == 0
    assert idle.ask("ps") == []
    # A random model writes nothing that could be forked; that is said, and nothing is trained.
    assert first.returncode == 2
    assert "answers has a structure that forks" in first.stderr
    again = idle.forq(*command, timeout_s=UP_S)
    assert "[2/6] answers: done before" in again.stderr
    (job,) = idle.ask("list")
    assert (job["name"], job["state"], job["counts"]["completed"]) == ("bootstrap", "completed", 10)
    record = json.loads((out / "bootstrap.json").read_text())
    assert record["stages"]["answers"]["job"] == job["job_id"]
