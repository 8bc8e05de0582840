"""An evaluation from questions to files, for `forq eval` and `forq bootstrap`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apar.evaluation import CategoryReport, EvaluatedRow, Measured, report_rows
from apar.evaluation.likelihood import scoring_dtype
from apar.evaluation.plot import plot_reports
from apar.evaluation.store import ANSWERS_FILE, PLOT_FILE, REPORT_FILE, write_answers, write_report
from jobs.console import Advance
from jobs.errors import BadInput
from worker.evaluation.answering import Answers, Question, answer_all
from worker.evaluation.contestants import Contestant
from worker.evaluation.scoring import score

MAX_SHOWN = 5
"""Prompts left out that are told one by one."""

Facts = dict[str, Any]
"""What is worth knowing of how answers came to be; goes into the report as it is."""


def answer_both(
    model: Contestant,
    base: Contestant,
    questions: Sequence[Question],
    max_tokens: int,
    *,
    advance: Advance,
    say: Callable[[str], None],
) -> tuple[list[EvaluatedRow], Facts]:
    """Both models' answers, not scored yet; a prompt that either cannot be asked is left out.

    Raises:
        BadInput: no prompt can be asked of both.
        Unavailable: an engine does not start, dies, or gives no receipts.
    """
    facts: Facts = {"model": model.name, "base": base.name, "max_tokens": max_tokens, "dtype": model.alias.dtype}
    sides: list[Answers] = []
    for phase, contestant in (("model", model), ("base", base)):
        started_at = time.monotonic()
        if phase == "base" and contestant.alias.kv_budget is None:
            contestant = contestant.with_blocks(sides[0].facts.num_blocks)

        def done(number: int, phase: str = phase) -> None:
            advance(phase, number, len(questions))

        answers = answer_all(contestant, questions, forks=phase == "model", max_tokens=max_tokens, advance=done)
        facts[f"{phase}_engine"] = {**asdict(answers.facts), "seconds": round(time.monotonic() - started_at, 1)}
        for row, reason in list(answers.refused.items())[:MAX_SHOWN]:
            say(f"row {row} is left out: {reason}")
        sides.append(answers)
    rows = pair(questions, *sides)
    facts["left_out"] = len(questions) - len(rows)
    if not rows:
        raise BadInput(f"none of {len(questions)} prompts can be asked of both models: shorten them")
    return rows, facts


def score_rows(rows: Sequence[EvaluatedRow], base: Contestant, *, advance: Advance) -> tuple[list[EvaluatedRow], Facts]:
    """The rows with every answer's log-likelihood under the base; see `worker.evaluation.scoring.score`."""
    started_at = time.monotonic()
    scored = score(rows, base, advance=advance)
    return scored, {"scoring_dtype": scoring_dtype(), "scoring_s": round(time.monotonic() - started_at, 1)}


def write_evaluation(rows: Sequence[EvaluatedRow], facts: Facts, out: Path) -> list[CategoryReport]:
    """Write answers, report and plot into a folder that is there; returns the report."""
    reports = report_rows(rows)
    write_answers(rows, out / ANSWERS_FILE)
    write_report(reports, facts, out / REPORT_FILE)
    title = f"{Path(str(facts['model'])).name} beside its base, {len(rows)} prompts"
    plot_reports(reports, out / PLOT_FILE, title)
    return reports


def pair(questions: Sequence[Question], model: Answers, base: Answers) -> list[EvaluatedRow]:
    """The questions that both models answered."""
    return [
        EvaluatedRow(
            question.row,
            question.prompt,
            question.category,
            Measured.of(model.by_row[question.row]),
            Measured.of(base.by_row[question.row]),
        )
        for question in questions
        if question.row in model.by_row and question.row in base.by_row
    ]
