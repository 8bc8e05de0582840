"""Figures for people: the rows of a table, and two answers side by side."""

from collections.abc import Sequence

from apar.evaluation.answers import Answer, EvaluatedRow
from apar.evaluation.report import CategoryReport, SideReport

COLUMNS = [
    "category",
    "answers",
    "fork",
    "threads",
    "steps",
    "attended",
    "cached",
    "tokens, base",
    "log-lik., base",
    "repeated, base",
    "loops, base",
    "lists, base",
    "cut, base",
    "empty",
]
LEGEND = (
    "fork: share of answers that fork. threads: mean of those. steps, attended, cached: of sequential decoding, all "
    "answers. log-lik.: nats per token under the base. repeated: share of runs of 4 words seen before. lists: left "
    "unfinished by answers that ended by themselves. cut: ended by max_tokens. empty: threads without text. "
    "A / B: the model's and the base's."
)


def table_rows(reports: Sequence[CategoryReport]) -> list[list[str]]:
    """A row of `COLUMNS` for each report; a dash where there is no figure."""
    return [_table_row(report) for report in reports]


def _table_row(report: CategoryReport) -> list[str]:
    model, base = report.model, report.base

    def both(show: str, name: str) -> str:
        return f"{_number(getattr(model, name), show)} / {_number(getattr(base, name), show)}"

    return [
        report.category,
        str(report.answers),
        _number(report.forking_share, ".0%"),
        _number(report.threads_mean_forking, ".1f"),
        _number(report.critical_path, ".2f"),
        _number(report.attended, ".2f"),
        _number(report.peak_cached, ".2f"),
        both(".0f", "output_tokens_mean"),
        f"{both('.3f', 'log_likelihood')} ({_number(report.log_likelihood_change, '+.0%')})",
        both(".3f", "repetition"),
        both(".0%", "loop_share"),
        both(".0%", "unfinished_list_share"),
        f"{_number(_cut_share(model), '.0%')} / {_number(_cut_share(base), '.0%')}",
        str(report.empty_threads),
    ]


def _cut_share(side: SideReport) -> float:
    return side.length / (side.stop + side.length)


def _number(value: float | None, show: str) -> str:
    return "-" if value is None else format(value, show)


def spread(num_rows: int, num_wanted: int) -> list[int]:
    """Numbers of `num_wanted` rows (or all), evenly spaced over the file: categories often stand one after another."""
    wanted = min(num_rows, num_wanted)
    return [i * num_rows // wanted for i in range(wanted)]


def headline(row: EvaluatedRow) -> str:
    category = f" ({row.category})" if row.category else ""
    return f"row {row.row}{category}: {row.prompt}"


def caption(answer: Answer) -> str:
    """What an answer cost, in one line."""
    threads = f"{answer.threads} threads" if answer.forks else "1 thread"
    ending = "ended by itself" if not answer.was_cut else f"cut ({answer.finish_reason})"
    return f"{answer.output_tokens} tokens in {answer.steps} steps, {threads}, {ending}"
