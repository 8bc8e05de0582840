"""Answers for tests that count by hand."""

from typing import Any

from apar.evaluation import Answer, AnswerNode, EvaluatedRow, Likelihood, Measured

PLAIN: dict[str, Any] = {
    "text": "One two three.",
    "finish_reason": "stop",
    "prompt_tokens": 3,
    "output_tokens": 5,
    "threads": 1,
    "steps": 5,
    "peak_cached_tokens": 7,
    "attended_tokens": 30,
}


def answer(**values: Any) -> Answer:
    """The defaults are an answer of 5 tokens that does not fork: P = 3, N = 5."""
    return Answer(**{**PLAIN, **values})


def measured(log_likelihood: float | None = None, scored_tokens: int = 0, **values: Any) -> Measured:
    likelihood = None if log_likelihood is None else Likelihood(log_likelihood, scored_tokens)
    return Measured.of(answer(**values), likelihood)


def row(number: int, model: Measured, base: Measured, category: str = "") -> EvaluatedRow:
    return EvaluatedRow(number, f"Question {number}?", category, model, base)


def forked_example() -> Answer:
    """The worked example of docs/statistics.md: `a [Fork] b <end>` with the detail `x y`."""
    return answer(
        text="axyb",
        threads=2,
        steps=5,
        peak_cached_tokens=8,
        attended_tokens=46,
        nodes=(
            AnswerNode(0, None, "root", 0, 0, 1, 0, 0, 0, 1),
            AnswerNode(1, 0, "detail", 1, 1, 3, 2, 3, 1, 3),
            AnswerNode(2, 0, "sibling", 0, 3, 5, 2, 3, 3, 4),
        ),
    )
