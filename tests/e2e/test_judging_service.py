"""docs/judging.md, as it is written, on the real service with the real small model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[2] / "docs" / "judging.md"
CATEGORIES = ["facts", "facts", "advice", "advice"]


def blocks(language: str) -> list[str]:
    text = PAGE.read_text()
    return [part.partition("\n```")[0] for part in text.split(f"\n```{language}\n")[1:]]


def report_of(service: Service, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((service.work / name / "report.json").read_text())
    return report


def table_of(service: Service, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(service.work / name / "results.parquet").to_pylist()
    return rows


@pytest.fixture(scope="module")
def judged(idle_service: Service) -> Service:
    """The page's commands have run, in order; the service is down again."""
    (program,) = blocks("python")
    subprocess.run([sys.executable, "-c", program], cwd=idle_service.work, check=True, env=dict(os.environ))
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        ["forq", "up"], ["forq", "judge"], ["forq", "judge"], ["forq", "down"]
    ]  # fmt: skip
    for command in commands:
        done = idle_service.forq(*command[1:], timeout_s=900)
        assert done.returncode == 0, done.stderr
    return idle_service


def test_every_score_was_read_because_the_engine_allows_no_other_reply(judged: Service) -> None:
    report = report_of(judged, "scores")
    (judge,) = report["judges"]
    assert report["constrained"] == {"smollm2-135m": True}
    assert (judge["total"], judge["judged"], judge["null"], judge["failed"]) == (4, 4, 0, 0)
    assert judge["parse_rate"] == 1.0
    rows = table_of(judged, "scores")
    assert [row["row"] for row in rows] == [0, 1, 2, 3]
    assert [row["category"] for row in rows] == CATEGORIES
    assert all(1 <= row["score"] <= 5 and row["reply"] == str(row["score"]) for row in rows)
    assert {row["model"] for row in judge["scores"]} == {"north", "south"}


def test_every_pair_was_asked_in_both_orders(judged: Service) -> None:
    (judge,) = report_of(judged, "pairs")["judges"]
    assert (judge["total"], judge["judged"], judge["pairs"], judge["pairs_judged"]) == (4, 4, 2, 2)
    rows = table_of(judged, "pairs")
    assert [(row["model_a"], row["model_b"], row["row"], row["row_b"]) for row in rows] == [
        ("north", "south", 0, 1), ("north", "south", 2, 3)
    ]  # fmt: skip
    assert {row[f"verdict_{order}"] for row in rows for order in ("ab", "ba")} <= {"A", "B", "tie"}


def test_what_the_prompts_share_came_from_the_prefix_cache(judged: Service) -> None:
    for name in ("scores", "pairs"):
        report = report_of(judged, name)
        cache = report["judges"][0]["prefix_cache"]
        assert 0 < cache["cached_tokens"] < cache["prompt_tokens"]
        stats = judged.ask("stats", report["jobs"]["smollm2-135m"])
        assert stats["cached_prompt_tokens"] == cache["cached_tokens"]
        assert stats["prefix_cache_hit_rate"] == pytest.approx(cache["hit_rate"], abs=1e-4)


def test_the_same_command_again_reads_the_same_job(judged: Service) -> None:
    before = report_of(judged, "scores")
    again = judged.ask("judge", "answers.parquet", "--kind", "pointwise", "--model", "smollm2-135m", "--out", "scores")
    assert again == before
    assert len(judged.ask("list")) == 2


def test_a_mistake_is_told_in_one_line(judged: Service) -> None:
    done = judged.forq("judge", "answers.parquet", "--kind", "reference", "--out", "third")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "forq: answers.parquet has no column for reference: name it like --column reference=NAME"
    )
    assert not (judged.work / "third").exists()
