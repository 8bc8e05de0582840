"""Every figure of a report, counted by hand."""

import json

import pytest
from evaluated import answer, forked_example, measured, row

from apar.errors import InputError
from apar.evaluation import AnswerNode, CategoryReport, report_rows
from apar.evaluation.answers import Measured
from apar.evaluation.presenting import COLUMNS, caption, headline, spread, table_rows


def forked(**values: object) -> Measured:
    """P = 3, N = 5, sequentially 8 cached and 30 attended."""
    return measured(**{"threads": 3, "steps": 2, "peak_cached_tokens": 6, "attended_tokens": 20, **values})


def only(*rows: object) -> CategoryReport:
    (report,) = report_rows(list(rows))  # type: ignore[arg-type]
    return report


def test_an_answer_knows_what_it_would_cost_sequentially() -> None:
    example = forked_example()
    assert (example.sequential_peak_tokens, example.sequential_attended_tokens) == (8, 30)
    assert example.forks
    assert not answer().forks


def test_savings_are_ratios_of_sums_beside_means_of_ratios() -> None:
    long = {"prompt_tokens": 10, "output_tokens": 20, "steps": 20, "peak_cached_tokens": 29, "attended_tokens": 410}
    report = only(row(0, forked(), measured()), row(1, measured(**long), measured(**long)))
    assert (report.answers, report.forking_share) == (2, 0.5)
    assert (report.threads_mean, report.threads_mean_forking, report.threads_max) == (2.0, 3.0, 3)
    assert report.critical_path == 22 / 25
    assert report.critical_path_mean == (2 / 5 + 20 / 20) / 2
    assert report.critical_path_forking == 2 / 5
    assert report.attended == (20 + 410) / (30 + 410)
    assert report.attended_mean == (20 / 30 + 1) / 2
    assert report.attended_forking == 20 / 30
    assert report.peak_cached == (6 + 29) / (8 + 30)
    assert report.peak_cached_mean == (6 / 8 + 29 / 30) / 2
    assert report.peak_cached_forking == 6 / 8


def test_where_nothing_forks_figures_of_forking_answers_are_missing() -> None:
    report = only(row(0, measured(), measured()))
    assert report.forking_share == 0
    assert (report.threads_mean, report.threads_mean_forking) == (1.0, None)
    assert (report.critical_path_forking, report.attended_forking, report.peak_cached_forking) == (None, None, None)


def test_an_answer_of_no_tokens_divides_nothing() -> None:
    empty = measured(text="", output_tokens=0, steps=0, attended_tokens=0, peak_cached_tokens=0)
    report = only(row(0, empty, empty))
    assert (report.critical_path, report.attended, report.length_ratio) == (None, None, None)
    assert report.model.repetition is None
    assert report.model.repetition_mean == 0


def test_likelihoods_are_per_token_and_compared_with_the_base() -> None:
    report = only(
        row(0, measured(-30.0, 20), measured(-8.0, 10)),
        row(1, measured(-1.0, 10), measured(-7.0, 20)),
    )
    assert report.model.log_likelihood == -31 / 30
    assert report.model.log_likelihood_mean == (-1.5 - 0.1) / 2
    assert report.base.log_likelihood == -15 / 30
    assert report.base.log_likelihood_mean == (-0.8 - 0.35) / 2
    assert report.log_likelihood_change == pytest.approx((-31 + 15) / 15)  # 107 % less likely
    assert report.log_likelihood_change_mean == pytest.approx((-0.8 + 0.575) / 0.575)


def test_without_loops_leaves_both_answers_of_a_prompt_out() -> None:
    loop = "we plan our day and " * 3
    report = only(
        row(0, measured(-30.0, 20), measured(-10.0, 10)),
        row(1, measured(-9.0, 10), measured(-0.1, 20, text=loop)),
    )
    assert report.base.loop_share == 0.5
    assert report.log_likelihood_change_without_loops == pytest.approx((-1.5 + 1.0) / 1.0)


def test_answers_that_were_not_scored_have_no_likelihood() -> None:
    report = only(row(0, measured(-1.0, 2), measured(-1.0, 2)), row(1, measured(), measured()))
    assert (report.model.log_likelihood, report.log_likelihood_change) == (None, None)


def test_texts_are_judged_for_both_models() -> None:
    repeating = "a b c d a b c d"  # 1 of 5 runs
    report = only(
        row(0, measured(text=repeating, output_tokens=9), measured(text="Tips:")),
        row(1, measured(text="one two three four five"), measured(text="Tips:", finish_reason="length")),
    )
    assert report.model.repetition == 1 / 7
    assert report.model.repetition_mean == (1 / 5 + 0) / 2
    assert report.model.output_tokens_mean == 7.0
    assert report.length_ratio == 14 / 10
    assert (report.base.unfinished_list_share, report.base.cut_list_share) == (0.5, 0.5)
    assert (report.model.unfinished_list_share, report.model.cut_list_share) == (0.0, 0.0)
    assert (report.base.stop, report.base.length) == (1, 1)
    assert (report.model.stop, report.model.length) == (2, 0)


def nodes_with_detail(start: int, end: int, text_start: int, text_end: int) -> tuple[AnswerNode, ...]:
    return (
        AnswerNode(0, None, "root", 0, 0, start, 0, 1, 0, text_start),
        AnswerNode(1, 0, "detail", 1, start, end, 2, 3, text_start, text_end),
    )


def test_a_detail_without_text_is_an_empty_thread() -> None:
    assert forked_example().empty_threads == 0
    assert answer(nodes=nodes_with_detail(2, 2, 4, 4)).empty_threads == 1
    assert answer(text="One \n two", nodes=nodes_with_detail(2, 3, 3, 6)).empty_threads == 1  # only white space
    assert answer(text="One x two", nodes=nodes_with_detail(2, 3, 3, 6)).empty_threads == 0
    report = only(row(0, measured(threads=2, nodes=nodes_with_detail(2, 2, 4, 4)), measured()))
    assert report.empty_threads == 1


def test_a_detail_that_begins_where_the_answer_was_cut_is_no_empty_thread() -> None:
    cut = {"finish_reason": "length", "text": "One two three."}
    assert answer(**cut, nodes=nodes_with_detail(5, 5, 14, 14)).empty_threads == 0
    assert answer(**cut, nodes=nodes_with_detail(2, 2, 4, 4)).empty_threads == 1


def test_categories_come_in_the_order_of_the_file_and_all_behind_them() -> None:
    rows = [row(i, measured(), measured(), name) for i, name in enumerate(["writing", "coding", "writing"])]
    reports = report_rows(rows)
    assert [(report.category, report.answers) for report in reports] == [("writing", 2), ("coding", 1), ("all", 3)]


def test_a_category_called_like_the_total_is_refused_and_so_are_no_rows() -> None:
    with pytest.raises(InputError, match="called 'all'"):
        report_rows([row(0, measured(), measured(), "all")])
    with pytest.raises(InputError, match="at least 1"):
        report_rows([])


def test_the_json_has_plain_values_and_the_fields_names() -> None:
    value = only(row(0, forked(), measured(-1.0, 3))).as_json()
    assert json.loads(json.dumps(value)) == value
    assert list(value) == list(CategoryReport.__slots__)
    assert value["model"].keys() == value["base"].keys()
    assert value["critical_path"] == 0.4
    assert value["attended"] == 0.666667


def test_a_table_row_has_a_cell_for_each_column_and_a_dash_for_nothing() -> None:
    reports = report_rows([row(0, forked(), measured(), "coding")])
    for cells in table_rows(reports):
        assert len(cells) == len(COLUMNS)
    assert dict(zip(COLUMNS, table_rows(reports)[0], strict=True)) == {
        "category": "coding",
        "answers": "1",
        "fork": "100%",
        "threads": "3.0",
        "steps": "0.40",
        "attended": "0.67",
        "cached": "0.75",
        "tokens, base": "5 / 5",
        "log-lik., base": "- / - (-)",
        "repeated, base": "- / -",
        "loops, base": "0% / 0%",
        "lists, base": "0% / 0%",
        "cut, base": "0% / 0%",
        "empty": "0",
    }


def test_rows_are_spread_evenly() -> None:
    assert spread(80, 4) == [0, 20, 40, 60]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(5, 1) == [0]
    assert spread(5, 0) == []


def test_captions_say_what_an_answer_cost() -> None:
    assert caption(forked_example()) == "5 tokens in 5 steps, 2 threads, ended by itself"
    assert caption(answer(finish_reason="length")) == "5 tokens in 5 steps, 1 thread, cut (length)"
    assert headline(row(7, measured(), measured(), "coding")) == "row 7 (coding): Question 7?"
    assert headline(row(7, measured(), measured())) == "row 7: Question 7?"
