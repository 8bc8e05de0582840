"""The whole service with a tiny model that forks, driven through the command line."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service import CONFIGURATION, PATIENCE_S, Service
from sqlalchemy import select
from tiny_models import make_tiny_model

from db.models import Job, Output, Request, RequestStats, ThreadNode

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "tiny"
NUM_ROWS = 24
PROMPTS = [f"{n}: name some things to do on a day like this, and {n * n} reasons." for n in range(NUM_ROWS)]
OPTIONS = ("--model", MODEL, "--max-tokens", 120, "--temperature", 0)


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service, up, with the tiny model as its default."""
    folder = tmp_path_factory.mktemp("forking")
    model: Path = make_tiny_model(folder / "model")
    alias = CONFIGURATION.format(model=MODEL, path=model).replace(
        "default_max_tokens", 'dtype = "float32"\ndefault_max_tokens'
    )
    service = Service(folder / "home", f'default_model = "{MODEL}"\n{alias}')
    service.write("prompts.parquet", {"prompt": PROMPTS})
    service.up()
    yield service
    service.clean_up()


@pytest.fixture(scope="module")
def forked(forking: Service) -> str:
    """A job with --decoding apar, ended."""
    return run(forking, "--decoding", "apar")


def run(service: Service, *options: object) -> str:
    job = str(service.ask("submit", service.work / "prompts.parquet", *OPTIONS, *options)["job_id"])
    status = service.ask("wait", job, "--timeout", PATIENCE_S)
    assert status["counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0, "cancelled": 0}
    return job


def test_answers_fork_and_the_trees_in_sql_cover_them(forking: Service, forked: str) -> None:
    with forking.database() as database, database.read() as connection:
        of_job = Request.job_id == forked
        outputs = connection.execute(select(Output.__table__).join(Request).where(of_job)).all()
        stats = connection.execute(select(RequestStats.__table__).join(Request).where(of_job)).all()
        nodes = connection.execute(
            select(ThreadNode.__table__).join(Request).where(of_job).order_by(ThreadNode.request_id, ThreadNode.node)
        ).all()
    receipts = {row.request_id: row for row in stats}
    assert len(outputs) == len(receipts) == NUM_ROWS
    assert sum(row.forks > 0 for row in stats) > NUM_ROWS // 4
    for output in outputs:
        tree, receipt = [n for n in nodes if n.request_id == output.request_id], receipts[output.request_id]
        assert [node.start for node in tree] == [0, *(node.end for node in tree[:-1])]
        assert tree[-1].end == output.output_tokens
        assert "".join(output.text[node.text_start : node.text_end] for node in tree) == output.text
        assert receipt.forks > 0 or len(tree) == 1
        assert receipt.threads == receipt.forks + 1
        assert receipt.sequential_peak_tokens == output.prompt_tokens + output.output_tokens
    saved = forking.ask("stats", forked)
    assert (saved["decoding"], saved["num_samples"]) == ("apar", NUM_ROWS)
    assert saved["forked_samples"] == sum(row.forks > 0 for row in stats)
    assert saved["steps"] == sum(row.steps for row in stats) < saved["sequential_steps"]
    attended = sum(row.attended_tokens for row in stats) / sum(row.sequential_attended_tokens for row in stats)
    assert saved["attended_saved_percent"] == pytest.approx(100 * (1 - attended), abs=0.01)


def test_the_tree_is_exported_shown_drawn_and_told_over_http(forking: Service, forked: str) -> None:
    rows: list[dict[str, Any]] = forking.export(forked, "--with-trees")
    number = max(range(NUM_ROWS), key=lambda n: len(rows[n]["forq_tree"]))
    row = rows[number]
    assert len(row["forq_tree"]) == 1 + 2 * row["forq_forks"] or row["forq_finish_reason"] == "length"
    shown = forking.forq("show", forked, number, "--svg", "tree.svg")
    assert (shown.returncode, shown.stdout.count("detail, thread")) == (
        0,
        sum(n["kind"] == "detail" for n in row["forq_tree"]),
    )
    ElementTree.parse(forking.work / "tree.svg")
    with httpx.Client(base_url=forking.url, timeout=60) as client:
        (sample,) = client.get(f"/v1/jobs/{forked}/requests/{number}").json()["samples"]
        assert client.get(f"/v1/jobs/{forked}/stats").json() == forking.ask("stats", forked)
    assert [node["start"] for node in sample["tree"]] == [node["start"] for node in row["forq_tree"]]
    assert "".join(node["text"] for node in sample["tree"]) == sample["output"] == row["forq_output"]


def test_ar_on_the_same_model_never_forks(forking: Service) -> None:
    rows = forking.export(run(forking, "--decoding", "ar"), "--with-trees")
    assert {(row["forq_threads"], row["forq_forks"], len(row["forq_tree"])) for row in rows} == {(1, 0, 1)}


def test_jobs_that_share_the_budget_end_with_the_same_answers(forking: Service, forked: str) -> None:
    expected = [row["forq_output"] for row in forking.export(forked)]
    submitted = [
        forking.ask("submit", forking.work / "prompts.parquet", *OPTIONS, "--decoding", "apar", "--kv-share", share)[
            "job_id"
        ]
        for share in (0.2, 0.9)
    ]
    for job in submitted:
        assert forking.ask("wait", job, "--timeout", PATIENCE_S)["state"] == "completed"
        assert [row["forq_output"] for row in forking.export(job)] == expected
    with forking.database() as database, database.read() as connection:
        shares = connection.execute(select(Job.id, Job.kv_share).where(Job.kv_share.is_not(None))).all()
    assert dict(map(tuple, shares)) == dict(zip(submitted, (0.2, 0.9), strict=True))


def test_check_says_how_the_model_forks(forking: Service) -> None:
    report = forking.ask("check", "prompts.parquet", "--model", MODEL)
    assert report["forks"] == {
        "fork_token": "[Fork]", "fork_token_id": 3, "child_token": "[Child]", "child_token_id": 4,
        "max_width": 32, "max_forks": 64, "max_depth": 2,
    }  # fmt: skip
    said = forking.forq("check", "prompts.parquet", "--model", MODEL).stdout
    assert (
        "yes: [Fork] is token 3, [Child] is token 4; at most 64 forks of an answer, 2 deep, 32 threads at once" in said
    )
