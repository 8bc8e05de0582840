"""Pairs of answers to one question, made of a file's rows, each by one model."""

from collections.abc import Sequence
from itertools import combinations, islice
from typing import Any

from jobs.errors import BadInput
from jobs.judging.answers import MAX_ROWS, Answers
from jobs.judging.items import UNREADABLE, Item

Question = dict[str, Item]
"""Answers by model."""


def pairs_of(answers: Answers, singles: Sequence[Item], limit: int | None) -> tuple[list[Item], int]:
    """Every two models that answered the same question, in the order of the file, and how many rows are in no pair.

    Args:
        limit: of questions, each with all its pairs.

    Raises:
        BadInput: a row without a model, a question that a model answered twice, nothing to pair, too many pairs.
    """
    questions, num_alone = _questions(answers, singles)
    paired = [found for found in questions if len(found) > 1]
    if not paired:
        told_by = f"column {answers.roles['id']!r}" if "id" in answers.roles else "their prompts"
        raise BadInput(
            f"{answers.path.name}: no question was answered by two models, so nothing can be paired; questions are "
            f"told apart by {told_by}: name another column with --column id=NAME"
        )
    num_unpaired = num_alone + len(questions) - len(paired)
    paired = list(islice(paired, limit))
    num_pairs = sum(len(found) * (len(found) - 1) // 2 for found in paired)
    if num_pairs > MAX_ROWS:  # counted before they are made: they would fill the memory
        raise BadInput(
            f"{answers.path.name}: its {len(paired)} question(s) make {num_pairs} pairs, the limit is {MAX_ROWS}: "
            "judge fewer questions with --limit, or leave models out"
        )
    places = {model: place for place, model in enumerate(dict.fromkeys(item.model for item in singles))}
    pairs = [
        _pair(found[a], found[b])
        for found in paired
        for a, b in combinations(sorted(found, key=places.__getitem__), 2)
    ]  # fmt: skip
    return pairs, num_unpaired


def _questions(answers: Answers, singles: Sequence[Item]) -> tuple[list[Question], int]:
    """Answers by question, and the number of rows that belong to none."""
    questions: dict[str, Question] = {}
    num_alone = 0
    for item in singles:
        if item.model is None:
            raise BadInput(f"{answers.path.name}: row {item.row} has no model: pairs need one in every row")
        if item.model == UNREADABLE and item.error:
            num_alone += 1
            continue
        found = questions.setdefault(item.question, {})
        other = found.setdefault(item.model, item)
        if other is item:
            continue
        if not (item.error or other.error):
            raise BadInput(
                f"{answers.path.name}: rows {other.row} and {item.row} are answers of {item.model} to one question: "
                "keep one, or give the questions an id column"
            )
        # A row that cannot be judged takes no other's place, as where a failed answer was asked for again.
        found[item.model] = other if item.error else item
        num_alone += 1
    return list(questions.values()), num_alone


def _pair(a: Item, b: Item) -> Item:
    facts: dict[str, Any] = {
        "row": a.row,
        "row_b": b.row,
        "question": a.question,
        "id": a.id,
        "category": a.category,
        "model": a.model,
        "model_b": b.model,
    }
    if a.error or b.error:
        return Item(**facts, error=a.error or b.error)
    of_a, of_b = a.values["turns"], b.values["turns"]
    if [turn["prompt"] for turn in of_a] != [turn["prompt"] for turn in of_b]:
        return Item(**facts, error="the two answers' prompts differ although their ids are the same")
    turns = [_both(of_a, of_b) for of_a, of_b in zip(of_a, of_b, strict=True)]
    return Item(**facts, values={**_without_response(a.values), **turns[0], "turns": turns})


def _both(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    return {**_without_response(a), "response_a": a["response"], "response_b": b["response"]}


def _without_response(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "response"}
