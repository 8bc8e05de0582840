"""Reports over verdicts that are written down here: who won whatever the places, and how sure that is."""

from pathlib import Path
from typing import Any

import pytest

from jobs.judging import statistics
from jobs.judging.items import Item
from jobs.judging.presenting import matrix_of, plot, table_of
from jobs.judging.report import make_report
from jobs.judging.table import Judged, Reply


def pair(a: str, b: str, ab: str | None, ba: str | None, question: str = "q", category: str | None = None) -> Judged:
    """What was said of a pair in each order."""
    item = Item(0, question=question, model=a, model_b=b, category=category)
    return Judged("judge", item, 1, {"ab": Reply(ab), "ba": Reply(ba)})


def score(value: int, question: str, turn: int = 1) -> Judged:
    return Judged("judge", Item(0, question=question, model="x"), turn, {None: Reply(str(value))})


def report_of(judged: list[Judged], kind: Any = "pairwise", inconsistent: str = "tie") -> dict[str, Any]:
    facts = {"kind": kind, "scale": None if kind == "pairwise" else [1, 5]}
    report = make_report(kind, {"judge": judged}, scale=(1, 5), inconsistent=inconsistent, seed=0, facts=facts)
    (judge,) = report["judges"]
    return {**report, **judge}


RANDOMISED = [pair("x", "y", "A", "B", f"q{n}") for n in range(8)] + [
    pair("y", "x", "A", "B", f"q{n}") for n in range(8, 10)
]
"""The winner stands first in the file: x in 8 pairs, y in 2."""


def test_two_models_are_one_pair_in_whatever_order_they_stand_in_a_row() -> None:
    judge = report_of(RANDOMISED)
    (row,) = judge["wins"]
    assert (row["model_a"], row["model_b"], row["pairs"], row["wins_a"], row["wins_b"]) == ("x", "y", 10, 8, 2)
    assert row["win_rate_a"] == 0.8
    _, rows = matrix_of(judge)
    assert [line[:4] for line in rows] == [["x", None, "0.800", "0.800"], ["y", "0.200", None, "0.200"]]
    assert len(table_of("pairwise", judge)[1]) == 1


def test_flips_and_the_bias_are_of_places_and_not_of_models() -> None:
    judge = report_of([pair("x", "y", "A", "A"), pair("y", "x", "A", "A"), pair("y", "x", "B", "A")])
    assert (judge["flipped"], judge["reversed"]) == (2, 2)
    assert judge["position_bias"] == {"decided": 6, "first_place_share": round(5 / 6, 6)}
    (row,) = judge["wins"]
    assert (row["wins_a"], row["wins_b"], row["ties"], row["flipped"]) == (1, 0, 2, 2)


def test_a_model_against_itself_is_no_other_pairs_rate() -> None:
    judge = report_of([pair("x", "x", "A", "B"), pair("y", "x", "A", "B")])
    _, rows = matrix_of(judge)
    assert [line[:3] for line in rows] == [["x", None, "0.000"], ["y", "1.000", None]]


def test_a_judge_without_a_bias_has_none_however_many_replies_are_null() -> None:
    fair = [pair("x", "y", "A", "B"), pair("x", "y", "B", "A")]
    half = [pair("x", "y", "A", None)] * 6
    assert report_of(fair + half)["position_bias"] == {"decided": 4, "first_place_share": 0.5}


def test_verdicts_on_one_question_do_not_make_an_interval_narrower() -> None:
    """Six pairs of each of 12 questions, all alike: as sure as one of each."""
    one = [pair("x", "y", "A" if n % 3 else "B", "B" if n % 3 else "A", f"q{n}") for n in range(12)]
    once, often = report_of(one), report_of(one * 6)
    for name in ("low", "high"):
        assert often["models"][0][name] == pytest.approx(once["models"][0][name])
        assert often["wins"][0][name] == pytest.approx(once["wins"][0][name])
    assert (often["wins"][0]["n"], often["wins"][0]["questions"]) == (72, 12)


def test_both_turns_of_a_conversation_are_one_question() -> None:
    turns = [score(1 + n % 5, f"q{n}", turn) for n in range(20) for turn in (1, 2)]
    total, first, _ = report_of(turns, "pointwise")["scores"]
    assert (total["n"], total["questions"], first["n"]) == (40, 20, 20)
    assert (total["low"], total["high"]) == pytest.approx((first["low"], first["high"]))


def test_one_question_says_nothing_about_others() -> None:
    (row,) = report_of([score(value, "q") for value in (1, 5, 3)], "pointwise")["scores"]
    assert (row["n"], row["mean"], row["low"], row["high"]) == (3, 3.0, None, None)


def test_an_expected_score_costs_no_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = statistics.mean_of

    def counted(values: Any, questions: Any, seed: int) -> statistics.Interval:
        calls.append(len(values))
        return real(values, questions, seed)

    monkeypatch.setattr(statistics, "mean_of", counted)
    report_of([score(1, "p"), score(5, "q")], "pointwise")
    assert calls == [2]


@pytest.mark.parametrize("kind", ["pairwise", "pointwise"])
def test_names_are_drawn_as_they_are_and_never_read_as_formulas(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), savefig(self, *args, **more))
    )
    odd = ["$x^$", "US$_{ and CA$", "_hidden", r"a\$b"]
    names = [f"{odd[0]} against {other}" for other in odd[1:]] if kind == "pairwise" else odd
    if kind == "pairwise":
        judged = [pair(odd[0], other, "A", "B", category=other) for other in odd[1:]]
    else:
        judged = [Judged("j", Item(0, model=name, category=name), 1, {None: Reply("4")}) for name in odd]
    report = report_of(judged, kind)
    report["judges"][0]["judge"] = "$x^$"
    plot(report, tmp_path / "report.png")
    (axis,) = figures[0].axes
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == names
    texts = [*axis.get_yticklabels(), *legend.get_texts()]
    assert not any(text.get_parse_math() for text in texts)
    assert {text.get_text() for text in axis.get_yticklabels()} >= set(odd[1:])
    assert axis.get_title(loc="left") == "judge: $x^$"
