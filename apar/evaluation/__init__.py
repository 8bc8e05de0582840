"""Judges a model that forks beside its base, without a judge: what forking saves, and what it does to the text.

Receives both models' answers to the same prompts with what the engine counted; hands on figures per category, a table,
a plot and files. Runs no engine; the one model it runs is the base, to score answers.
"""

from apar.evaluation.answers import Answer, AnswerNode, EvaluatedRow, Likelihood, Measured
from apar.evaluation.report import CategoryReport, SideReport, report_rows

__all__ = [
    "Answer",
    "AnswerNode",
    "CategoryReport",
    "EvaluatedRow",
    "Likelihood",
    "Measured",
    "SideReport",
    "report_rows",
]
