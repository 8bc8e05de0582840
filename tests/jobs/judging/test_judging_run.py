"""A judging from file to report, over the real database, with a judge whose replies are written by the test."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import MODEL, drain, failed, sample

from db.session import Database
from jobs import ending, results, service
from jobs.errors import BadInput, Conflict
from jobs.judging import run
from jobs.judging.folder import PLOT_FILE, PROMPTS_FILE, REPORT_FILE, RESULTS_FILE, STATE_FILE
from jobs.judging.options import JudgeOptions, parse_columns
from jobs.judging.presenting import matrix_of, summary_of, table_of
from jobs.settings import Settings

Judge = Callable[[str], str]
ANSWERS = {
    "question_id": [1, 1, 2, 2, 3, 3],
    "category": ["maths", "maths", "maths", "maths", "prose", "prose"],
    "model": ["x", "y"] * 3,
    "prompt": ["one?", "one?", "two?", "two?", "three?", "three?"],
    "response": ["good", "bad", "good", "fair", "bad", "good"],
}


def ignore(*_: object) -> None:
    pass


def answer_with(judge: Judge, **told: Any) -> Callable[[results.PendingRow], results.RowResult]:
    def answer(row: results.PendingRow) -> results.RowResult:
        reply = replace(sample(judge(row.payload["messages"][-1]["content"]), prompt_tokens=10), **told)
        return results.RowResult(row.request_id, (reply,))

    return answer


def judged_answer(text: str) -> str:
    return text.partition("=== Answer ===\n")[2].partition("\n")[0]


def grade(text: str) -> str:
    return {"good": "5", "fair": "3", "bad": "1"}[judged_answer(text)]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.parquet"
    pq.write_table(pa.table(ANSWERS), path)
    return path


class Judging:
    """`forq judge`, its parts one by one."""

    def __init__(self, database: Database, settings: Settings, folder: Path) -> None:
        self.database, self.settings, self.folder = database, settings, folder

    def __call__(self, answers: Path, judge: Any, kind: Any = "pointwise", **options: Any) -> dict[str, Any]:
        chosen = JudgeOptions(kind=kind, models=options.pop("models", (MODEL,)), **options)
        begun = run.begin(self.database, self.settings, answers, chosen, self.folder, ignore)
        for model in chosen.models:
            answer = judge[model] if isinstance(judge, dict) else judge
            reads_text = answer is grade or answer.__name__ == "<lambda>"
            drain(self.database, answer_with(answer) if reads_text else answer, model)
        assert run.wait(self.database, begun, ignore, ignore, timeout_s=0)
        report = run.finish(self.database, self.settings, answers, chosen, begun, ignore)
        assert json.loads((self.folder / REPORT_FILE).read_text()) == json.loads(json.dumps(report))
        assert (self.folder / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
        for judged in report["judges"]:
            assert judged["judged"] + judged["null"] + judged["failed"] == judged["total"]
        return report

    @property
    def table(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.folder / RESULTS_FILE).to_pylist()
        return rows


@pytest.fixture
def judging(database: Database, settings: Settings, tmp_path: Path) -> Judging:
    return Judging(database, settings, tmp_path / "judged")


def test_scores_come_out_in_the_files_order_and_add_up_by_model_and_category(judging: Judging, answers: Path) -> None:
    report = judging(answers, grade)
    assert [(row["row"], row["model"], row["score"], row["reply"]) for row in judging.table] == [
        (0, "x", 5, "5"), (1, "y", 1, "1"), (2, "x", 5, "5"), (3, "y", 3, "3"), (4, "x", 1, "1"), (5, "y", 5, "5")
    ]  # fmt: skip
    (judged,) = report["judges"]
    assert (judged["total"], judged["judged"], judged["parse_rate"]) == (6, 6, 1.0)
    means = {(row["model"], row["category"]): (row["n"], row["mean"]) for row in judged["scores"]}
    assert means == {
        ("x", "all"): (3, round(11 / 3, 6)), ("x", "maths"): (2, 5.0), ("x", "prose"): (1, 1.0),
        ("y", "all"): (3, 3.0), ("y", "maths"): (2, 2.0), ("y", "prose"): (1, 5.0),
    }  # fmt: skip
    (of_x,) = (row for row in judged["scores"] if (row["model"], row["category"]) == ("x", "all"))
    assert of_x["distribution"] == {1: 1, 5: 2}
    assert of_x["low"] < of_x["mean"] < of_x["high"]


def test_the_job_says_what_the_engine_is_to_enforce_and_its_prompts_are_sorted(judging: Judging, answers: Path) -> None:
    report = judging(answers, grade, logprobs=True)
    job = service.job_detail(judging.database, report["jobs"][MODEL])
    assert job.sampling == {
        "temperature": 0.0, "max_tokens": 10, "logprobs": 20, "structured": {"choice": ["1", "2", "3", "4", "5"]}
    }  # fmt: skip
    texts = [row["messages"][-1]["content"] for row in pq.read_table(judging.folder / PROMPTS_FILE).to_pylist()]
    assert texts == sorted(texts)


def test_every_row_is_judged_null_or_failed_whatever_becomes_of_it(judging: Judging, tmp_path: Path) -> None:
    path = tmp_path / "mixed.parquet"
    responses = ["good", "odd", None, "long", "twice"]
    pq.write_table(pa.table({"prompt": ["p"] * 5, "response": responses}), path)

    def judge(row: results.PendingRow) -> results.RowResult:
        answer = judged_answer(row.payload["messages"][-1]["content"])
        if answer == "long":
            return failed(row, "prompt_too_long", "the prompt has 9000 tokens")
        reply = {"good": "5", "odd": "7", "twice": "2 3"}[answer]
        return results.RowResult(row.request_id, (sample(reply),))

    (judged,) = judging(path, judge)["judges"]
    assert (judged["total"], judged["judged"], judged["null"], judged["failed"]) == (5, 1, 2, 2)
    assert judged["parse_rate"] == round(1 / 3, 6)
    assert judged["problems"] == {"out_of_range": 1, "several": 1}
    assert judged["errors"] == {"not_asked": 1, "prompt_too_long": 1}
    assert [(row["score"], row["problem"], row["reply"], row["error_code"]) for row in judging.table] == [
        (5, None, "5", None), (None, "out_of_range", "7", None), (None, None, None, "not_asked"),
        (None, None, None, "prompt_too_long"), (None, "several", "2 3", None),
    ]  # fmt: skip


def test_a_reply_that_was_cut_is_null(judging: Judging, answers: Path) -> None:
    (judged,) = judging(answers, answer_with(grade, finish_reason="length"))["judges"]
    assert (judged["null"], judged["problems"]) == (6, {"cut": 6})


def test_a_judge_that_loves_the_first_place_flips_every_pair(judging: Judging, answers: Path) -> None:
    (judged,) = judging(answers, lambda text: "A", kind="pairwise")["judges"]
    assert (judged["total"], judged["pairs"], judged["flipped"], judged["reversed"]) == (6, 3, 3, 3)
    assert (judged["flip_rate"], judged["position_bias"]) == (1.0, {"decided": 6, "first_place_share": 1.0})
    overall = judged["wins"][0]
    assert (overall["wins_a"], overall["wins_b"], overall["ties"], overall["null"]) == (0, 0, 3, 0)
    assert [(row["outcome"], row["flipped"]) for row in judging.table] == [("tie", True)] * 3


def better(text: str) -> str:
    ranks = {"bad": 0, "fair": 1, "good": 2}
    a, b = (ranks[text.partition(f"=== Answer {name} ===\n")[2].partition("\n")[0]] for name in "AB")
    return "tie" if a == b else "A" if a > b else "B"


def test_wins_are_counted_for_the_model_whatever_its_place(judging: Judging, answers: Path) -> None:
    (judged,) = judging(answers, answer_with(better), kind="pairwise")["judges"]
    assert (judged["flip_rate"], judged["position_bias"]["first_place_share"]) == (0.0, 0.5)
    by_category = {row["category"]: (row["wins_a"], row["wins_b"], row["ties"]) for row in judged["wins"]}
    assert by_category == {"all": (2, 1, 0), "maths": (2, 0, 0), "prose": (0, 1, 0)}
    assert {row["model"]: row["mean"] for row in judged["models"]} == {"x": round(2 / 3, 6), "y": round(1 / 3, 6)}
    first = judging.table[0]
    assert (first["row"], first["row_b"], first["model_a"], first["model_b"]) == (0, 1, "x", "y")
    assert (first["verdict_ab"], first["verdict_ba"], first["outcome"]) == ("A", "B", "a")


def test_a_flip_can_count_nothing_and_a_half_judged_pair_counts_nothing(judging: Judging, answers: Path) -> None:
    def judge(text: str) -> str:
        good_is_first = "=== Answer A ===\ngood" in text
        return "A" if "one?" in text else "neither" if good_is_first else "B"

    (judged,) = judging(answers, answer_with(judge), kind="pairwise", inconsistent="null")["judges"]
    overall = judged["wins"][0]
    assert (overall["pairs"], overall["n"], overall["null"], overall["flipped"]) == (3, 0, 3, 1)
    assert (judged["pairs_judged"], judged["null"], judged["problems"]) == (1, 2, {"no_verdict": 2})
    assert [(row["outcome"], row["flipped"]) for row in judging.table] == [(None, True), (None, None), (None, None)]


def test_two_judges_are_compared(judging: Judging, answers: Path) -> None:
    report = judging(answers, {MODEL: grade, "other": lambda text: "5" if grade(text) == "5" else "3"},
                     models=(MODEL, "other"))  # fmt: skip
    (agreement,) = report["agreement"]
    # Scores 5 1 5 3 1 5 beside 5 3 5 3 3 5; weights are squares of distances. Observed: two of distance 2, 8 / 6.
    # Expected, of 5 x3, 1 x2, 3 x1 beside 5 x3, 3 x3: (9 x 4 + 6 x 16 + 6 x 4 + 3 x 4) / 36 = 168 / 36.
    assert (agreement["judges"], agreement["n"], agreement["same_share"]) == ([MODEL, "other"], 6, round(4 / 6, 6))
    assert agreement["kappa"] == pytest.approx(1 - (8 / 6) / (168 / 36), abs=1e-6)
    assert [row["judge"] for row in judging.table] == [MODEL] * 6 + ["other"] * 6


def test_probabilities_become_expected_scores(judging: Judging, answers: Path) -> None:
    import math

    top = [{"token": "5", "logprob": math.log(0.75)}, {"token": "1", "logprob": math.log(0.25)}]
    end = {"token": "</s>", "logprob": 0.0, "top": []}
    told = json.dumps([{"token": "5", "logprob": math.log(0.75), "top": top}, end])
    (judged,) = judging(answers, answer_with(lambda text: "5", logprobs=told), logprobs=True)["judges"]
    assert judged["scores"][0]["expected_score"] == pytest.approx(4.0)
    assert judging.table[0]["expected_score"] == pytest.approx(4.0)
    assert judging.table[0]["probability_mass"] == pytest.approx(1.0)


def test_the_prefix_caches_part_is_reported(judging: Judging, answers: Path) -> None:
    (judged,) = judging(answers, answer_with(grade, cached_tokens=4))["judges"]
    assert judged["prefix_cache"] == {"prompt_tokens": 60, "cached_tokens": 24, "hit_rate": 0.4}


def test_both_turns_of_a_conversation_can_be_judged(judging: Judging, tmp_path: Path) -> None:
    path = tmp_path / "turns.parquet"
    pq.write_table(
        pa.table({"prompt": ["p"], "response": ["r"], "prompt_2": ["q"], "response_2": ["s"], "model": ["x"]}), path
    )
    (judged,) = judging(path, lambda text: "4" if "Grade answer 1." in text else "2", turns="each")["judges"]
    assert [(row["turn"], row["score"]) for row in judging.table] == [(1, 4), (2, 2)]
    assert [(row["turn"], row["mean"]) for row in judged["scores"]] == [(None, 3.0), (1, 4.0), (2, 2.0)]


def test_the_same_command_goes_on_with_the_same_job(judging: Judging, answers: Path) -> None:
    options = JudgeOptions(kind="pointwise", models=(MODEL,))
    begin = lambda: run.begin(judging.database, judging.settings, answers, options, judging.folder, ignore)  # noqa: E731
    first = begin()
    assert not run.wait(judging.database, first, ignore, ignore, timeout_s=0)
    assert begin().jobs == first.jobs
    # As if the process had been killed between the submit and the note of it.
    state = json.loads((judging.folder / STATE_FILE).read_text())
    (judging.folder / STATE_FILE).write_text(json.dumps({**state, "jobs": {}}))
    assert begin().jobs == first.jobs
    report = judging(answers, grade)
    assert report["jobs"] == first.jobs
    assert len(service.list_jobs(judging.database)) == 1
    assert judging(answers, grade) == report


def test_a_folder_of_another_judging_is_not_mixed_with_this_one(
    judging: Judging, answers: Path, tmp_path: Path
) -> None:
    judging(answers, grade)
    for options in ({"scale": (1, 4)}, {"reasons": True}, {"limit": 2}, {"ordered": False}, {"logprobs": True}):
        with pytest.raises(BadInput, match="holds a judging of another file or with other options"):
            judging(answers, grade, **options)
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="is not empty and holds no judging"):
        Judging(judging.database, judging.settings, other)(answers, grade)
    assert (other / "mine.txt").read_text() == "mine"


def test_a_cancelled_job_is_said_to_be_so_with_what_to_do(judging: Judging, answers: Path) -> None:
    options = JudgeOptions(kind="pointwise", models=(MODEL,))
    begun = run.begin(judging.database, judging.settings, answers, options, judging.folder, ignore)
    ending.cancel(judging.database, begun.jobs[MODEL])
    with pytest.raises(Conflict, match="is cancelled; `forq retry"):
        run.finish(judging.database, judging.settings, answers, options, begun, ignore)


def test_a_judge_without_structured_output_is_read_as_it_comes(judging: Judging, answers: Path) -> None:
    report = judging(answers, {"plain-reference": grade}, models=("plain-reference",))
    assert report["constrained"] == {"plain-reference": False}
    job = service.job_detail(judging.database, report["jobs"]["plain-reference"])
    assert "structured" not in job.sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("nobody",)}, "model 'nobody' is not configured"),
        ({"models": (MODEL, MODEL)}, "named twice"),
        ({"logprobs": True, "scale": (1, 10)}, "the scale is 1-10: use one within 0-9"),
        ({"logprobs": True, "models": ("plain-reference",)}, "has backend reference"),
        ({"kind": "pairwise", "scale": (1, 3)}, "--scale stands beside --kind pairwise"),
        ({"rubric": "nice"}, "there is no rubric 'nice'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    judging: Judging, answers: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        judging(answers, grade, **options)
    assert not judging.folder.exists()
    assert service.list_jobs(judging.database) == []


def test_column_flags_are_read_strictly() -> None:
    assert parse_columns(["prompt=question", "response=a=b"]) == {"prompt": "question", "response": "a=b"}
    for said in (["prompt"], ["=x"], ["prompt="], ["prompt=a", "prompt=b"]):
        with pytest.raises(BadInput, match="--column"):
            parse_columns(said)


def test_the_tables_show_the_reports_figures(judging: Judging, answers: Path) -> None:
    (judged,) = judging(answers, answer_with(better), kind="pairwise")["judges"]
    columns, rows = table_of("pairwise", judged)
    assert all(len(row) == len(columns) for row in rows)
    assert rows[0][:9] == ["x", "y", "all", None, 3, 2, 1, 0, 0]
    columns, rows = matrix_of(judged)
    assert columns[:4] == ["win rate of", "against x", "against y", "all pairs"]
    assert [row[:4] for row in rows] == [["x", None, "0.667", "0.667"], ["y", "0.333", None, "0.333"]]
    assert summary_of("pairwise", judged)[:2] == [
        f"judge {MODEL}: 6 verdicts asked for, 6 read, 0 null, 0 failed",
        "flips: 0 of 3 pairs (0.0 %), 0 of them to the other model",
    ]
