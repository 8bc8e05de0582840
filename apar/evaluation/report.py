"""Adds answers up, per category and over all of them.

A ratio `x` is one of sums, so that every token (or run of words) weighs the same; `x_mean` is the mean of the answers'
own ratios, so that every answer weighs the same; `x_forking` is a ratio of sums over the answers that fork. Where there
is nothing to divide by, a figure is None.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apar.errors import InputError
from apar.evaluation.answers import Answer, EvaluatedRow, Likelihood, Measured

ALL = "all"
"""What the total over all categories is called."""


@dataclass(frozen=True, slots=True)
class SideReport:
    """One model's answers, judged as texts."""

    output_tokens_mean: float
    log_likelihood: float | None
    """Under the base, in nats per token: the sum over all answers' tokens over their number."""
    log_likelihood_mean: float | None
    """The mean of the answers' own log-likelihoods per token."""
    repetition: float | None
    """1 - distinct / all runs of 4 words, counted within each answer and summed."""
    repetition_mean: float
    """The mean of the answers' own; an answer of fewer than 4 words repeats nothing."""
    repeated_sentence_share: float
    """Share of answers in which a sentence of at least 5 words comes twice."""
    loop_share: float
    """Share of answers with a run of words three times in succession."""
    unfinished_list_share: float
    """Share of all answers that ended by themselves and leave a list unfinished."""
    cut_list_share: float
    """The same of answers that were cut, which is no fault of theirs."""
    stop: int
    """Answers that ended by themselves."""
    length: int
    """Answers that were cut."""


@dataclass(frozen=True, slots=True)
class CategoryReport:
    """A category's figures. Its field names are the keys of the JSON."""

    category: str
    answers: int
    forking_share: float
    """Share of answers with two threads or more."""
    threads_mean: float
    threads_mean_forking: float | None
    threads_max: int
    empty_threads: int
    """Details without text, of all answers together."""
    critical_path: float | None
    """Engine steps over output tokens."""
    critical_path_mean: float | None
    critical_path_forking: float | None
    attended: float | None
    """Attended tokens over sequentially attended ones."""
    attended_mean: float | None
    attended_forking: float | None
    peak_cached: float | None
    """Peak cached tokens over the sequential P + N."""
    peak_cached_mean: float | None
    peak_cached_forking: float | None
    length_ratio: float | None
    """The model's output tokens over the base's."""
    log_likelihood_change: float | None
    """Model's less base's log-likelihood per token, over the base's absolute: -0.05 is 5 % less likely."""
    log_likelihood_change_mean: float | None
    """The same of `log_likelihood_mean`."""
    log_likelihood_change_without_loops: float | None
    """`log_likelihood_change` over prompts where neither answer loops: a loop is very likely and says nothing."""
    model: SideReport
    base: SideReport

    def as_json(self) -> dict[str, Any]:
        """Plain values, floats to 6 places."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def report_rows(rows: Sequence[EvaluatedRow]) -> list[CategoryReport]:
    """One report per category, in the order of their first rows, and `all` behind them.

    Rows that have no categories, all being of the category "", give `all` only.

    Raises:
        InputError: no rows, or a category called `all`.
    """
    if not rows:
        raise InputError("0 answers were given: at least 1 is needed for a report")
    names = [name for name in dict.fromkeys(row.category for row in rows) if name]
    if ALL in names:
        raise InputError(f"a category is called {ALL!r}, as the total over all of them is: give it another name")
    reports = [report_category(name, [row for row in rows if row.category == name]) for name in names]
    return [*reports, report_category(ALL, rows)]


def report_category(category: str, rows: Sequence[EvaluatedRow]) -> CategoryReport:
    """Add up rows that belong together, at least one."""
    answers = [row.model.answer for row in rows]
    forking = [answer for answer in answers if answer.forks]
    model, base = _side([row.model for row in rows]), _side([row.base for row in rows])
    plain = [row for row in rows if not (row.model.quality.loops or row.base.quality.loops)]
    num_output, num_base_output = (
        sum(side.answer.output_tokens for side in sides)
        for sides in ([row.model for row in rows], [row.base for row in rows])
    )
    return CategoryReport(
        category=category,
        answers=len(rows),
        forking_share=len(forking) / len(rows),
        threads_mean=_mean([answer.threads for answer in answers]) or 0.0,
        threads_mean_forking=_mean([answer.threads for answer in forking]),
        threads_max=max(answer.threads for answer in answers),
        empty_threads=sum(answer.empty_threads for answer in answers),
        **_ratios("critical_path", answers, lambda answer: (answer.steps, answer.output_tokens)),
        **_ratios("attended", answers, lambda answer: (answer.attended_tokens, answer.sequential_attended_tokens)),
        **_ratios("peak_cached", answers, lambda answer: (answer.peak_cached_tokens, answer.sequential_peak_tokens)),
        length_ratio=num_output / num_base_output if num_base_output else None,
        log_likelihood_change=_change(model.log_likelihood, base.log_likelihood),
        log_likelihood_change_mean=_change(model.log_likelihood_mean, base.log_likelihood_mean),
        log_likelihood_change_without_loops=_change(
            _per_token([row.model.likelihood for row in plain]), _per_token([row.base.likelihood for row in plain])
        ),
        model=model,
        base=base,
    )


def _side(side: Sequence[Measured]) -> SideReport:
    likelihoods = [measured.likelihood for measured in side]
    return SideReport(
        output_tokens_mean=_mean([measured.answer.output_tokens for measured in side]) or 0.0,
        log_likelihood=_per_token(likelihoods),
        log_likelihood_mean=_mean([own for one in likelihoods if (own := _per_token([one])) is not None]),
        repetition=_ratio((measured.quality.repeated_ngrams, measured.quality.ngrams) for measured in side),
        repetition_mean=_mean([measured.quality.repetition for measured in side]) or 0.0,
        repeated_sentence_share=_share(measured.quality.repeats_sentence for measured in side),
        loop_share=_share(measured.quality.loops for measured in side),
        unfinished_list_share=_share(bool(m.quality.unfinished_list) and not m.answer.was_cut for m in side),
        cut_list_share=_share(bool(m.quality.unfinished_list) and m.answer.was_cut for m in side),
        stop=sum(not measured.answer.was_cut for measured in side),
        length=sum(measured.answer.was_cut for measured in side),
    )


def _ratios(name: str, answers: Sequence[Answer], parts: Callable[[Answer], tuple[int, int]]) -> dict[str, Any]:
    each = [parts(answer) for answer in answers]
    return {
        name: _ratio(each),
        f"{name}_mean": _mean([above / below for above, below in each if below]),
        f"{name}_forking": _ratio(part for part, answer in zip(each, answers, strict=True) if answer.forks),
    }


def _ratio(parts: Iterable[tuple[int, int]]) -> float | None:
    pairs = list(parts)
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _per_token(likelihoods: Iterable[Likelihood | None]) -> float | None:
    """Nats per token; None where an answer has not been scored, or none has tokens."""
    found = list(likelihoods)
    if any(likelihood is None for likelihood in found):
        return None
    num_tokens = sum(likelihood.num_tokens for likelihood in found if likelihood)
    return sum(likelihood.log_likelihood for likelihood in found if likelihood) / num_tokens if num_tokens else None


def _change(model: float | None, base: float | None) -> float | None:
    return (model - base) / abs(base) if model is not None and base else None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value
