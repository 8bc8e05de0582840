"""Adds a judging up: counts in which every row is found again, scores or wins by model and category, agreement."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from jobs.judging import statistics
from jobs.judging.items import TOTAL
from jobs.judging.rubrics import Kind
from jobs.judging.table import Judged, Reply
from jobs.judging.verdicts import PAIR_LABELS, PROBLEMS

_TURNED = {"a": "b", "b": "a", "tie": "tie"}


def make_report(
    kind: Kind,
    by_judge: Mapping[str, Sequence[Judged]],
    *,
    scale: tuple[int, int],
    inconsistent: str,
    seed: int,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The report as plain values, floats to 6 places.

    Args:
        by_judge: the same items in the same order for each judge.
        facts: what is worth knowing of how the verdicts came about; it goes in front.
    """
    judges = [
        {"judge": judge, **_counts(judged), **_figures(kind, judged, inconsistent, seed)}
        for judge, judged in by_judge.items()
    ]
    report = {**facts, "judges": judges, "agreement": _agreement(kind, by_judge, scale)}
    plain: dict[str, Any] = _rounded(report)
    return plain


def _counts(judged: Sequence[Judged]) -> dict[str, Any]:
    """Every question to the judge once: `judged` + `null` + `failed` = `total`."""
    replies = [reply for one in judged for reply in one.replies.values()]
    states = Counter(reply.state for reply in replies)
    answered = states["judged"] + states["null"]
    problems = Counter(reply.problem for reply in replies if reply.problem)
    errors = Counter(reply.error_code for reply in replies if reply.error_code)
    return {
        "total": len(replies),
        "judged": states["judged"],
        "null": states["null"],
        "failed": states["failed"],
        "parse_rate": states["judged"] / answered if answered else None,
        "problems": {name: problems[name] for name in PROBLEMS if problems[name]},
        "errors": dict(errors.most_common()),
        "prefix_cache": _cache(replies),
    }


def _cache(replies: Sequence[Reply]) -> dict[str, Any]:
    told = [reply for reply in replies if reply.cached_tokens is not None and reply.prompt_tokens is not None]
    prompt, cached = (sum(getattr(reply, f"{name}_tokens") for reply in told) for name in ("prompt", "cached"))
    return {"prompt_tokens": prompt, "cached_tokens": cached, "hit_rate": cached / prompt if prompt else None}


def _figures(kind: Kind, judged: Sequence[Judged], inconsistent: str, seed: int) -> dict[str, Any]:
    if kind == "pairwise":
        return _pairwise(judged, inconsistent, seed)
    return {
        "scores": _groups(judged, lambda one: (one.item.model,), lambda key, some: _scores(key[0], some, seed)),
    }


def _scores(model: str | None, judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    scored = [(float(one.score), one.item.question) for one in judged if one.score is not None]
    scores = [score for score, _ in scored]
    expected = [value for one in judged if (value := one.expected_score) is not None]
    return {
        "model": model,
        "rows": len(judged),
        **asdict(statistics.mean_of(scores, [question for _, question in scored], seed)),
        "expected_score": statistics.plain_mean(expected),
        "distribution": dict(sorted(Counter(int(score) for score in scores).items())),
    }


def _pairwise(judged: Sequence[Judged], inconsistent: str, seed: int) -> dict[str, Any]:
    both = [one for one in judged if one.flipped is not None]
    flipped = [one for one in both if one.flipped]
    reversed_ = [one for one in flipped if {one.winner("ab"), one.winner("ba")} == {"a", "b"}]
    # Of both orders only: whoever lacks one has shown an answer more often in one place than in the other.
    said = [label for one in both for reply in one.replies.values() if (label := reply.label) is not None]
    decided, share = statistics.first_place_share(said)
    pairs = _pairs(judged)
    return {
        "pairs": len(judged),
        "pairs_judged": len(both),
        "flipped": len(flipped),
        "flip_rate": len(flipped) / len(both) if both else None,
        "reversed": len(reversed_),
        "position_bias": {"decided": decided, "first_place_share": share},
        "inconsistent": inconsistent,
        "wins": _groups(
            judged,
            lambda one: pairs[frozenset((one.item.model, one.item.model_b))],
            lambda key, some: _wins(key[0], key[1], some, inconsistent, seed),
        ),
        "models": _by_model(judged, inconsistent, seed),
    }


def _pairs(judged: Sequence[Judged]) -> dict[frozenset[str | None], tuple[str | None, str | None]]:
    """Every two models once, as they first came: which is A in a row may be chance."""
    found: dict[frozenset[str | None], tuple[str | None, str | None]] = {}
    for one in judged:
        pair = (one.item.model, one.item.model_b)
        found.setdefault(frozenset(pair), pair)
    return found


def _wins(a: str | None, b: str | None, judged: Sequence[Judged], inconsistent: str, seed: int) -> dict[str, Any]:
    """Of two models, in rows where either of them is A."""
    decided = [(outcome, one.item) for one in judged if (outcome := one.outcome(inconsistent)) is not None]
    outcomes = [outcome if item.model == a else _TURNED[outcome] for outcome, item in decided]
    wins = statistics.wins_of(outcomes, [item.question for _, item in decided], seed)
    rate = wins.rate_a
    return {
        "model_a": a,
        "model_b": b,
        "pairs": len(judged),
        "n": rate.n,
        "questions": rate.questions,
        "wins_a": wins.wins_a,
        "wins_b": wins.wins_b,
        "ties": wins.ties,
        "null": len(judged) - rate.n,
        "flipped": sum(one.flipped is True for one in judged),
        "win_rate_a": rate.mean,
        "low": rate.low,
        "high": rate.high,
    }


def _by_model(judged: Sequence[Judged], inconsistent: str, seed: int) -> list[dict[str, Any]]:
    """Each model's win rate over all its pairs."""
    points: dict[str | None, list[tuple[float, str]]] = {}
    for one in judged:
        outcome = one.outcome(inconsistent)
        for model, side in ((one.item.model, "a"), (one.item.model_b, "b")):
            found = points.setdefault(model, [])
            if outcome is not None:
                found.append((0.5 if outcome == "tie" else float(outcome == side), one.item.question))
    return [
        {"model": model, **asdict(statistics.mean_of([p for p, _ in found], [q for _, q in found], seed))}
        for model, found in points.items()
    ]


def _groups(
    judged: Sequence[Judged],
    key_of: Callable[[Judged], tuple[Any, ...]],
    figures: Callable[[tuple[Any, ...], Sequence[Judged]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The figures by model or pair of models: over all, then by turn where there are several, then by category."""
    by_key: dict[tuple[Any, ...], list[Judged]] = {}
    for one in judged:
        by_key.setdefault(key_of(one), []).append(one)
    turns = sorted({one.turn for one in judged})
    categories = list(dict.fromkeys(one.item.category for one in judged if one.item.category is not None))
    found = []
    for key, mine in by_key.items():
        found.append({"category": TOTAL, "turn": None, **figures(key, mine)})
        if len(turns) > 1:
            for turn in turns:
                some = [one for one in mine if one.turn == turn]
                found.append({"category": TOTAL, "turn": turn, **figures(key, some)})
        for category in categories:
            some = [one for one in mine if one.item.category == category]
            if some:
                found.append({"category": category, "turn": None, **figures(key, some)})
    return found


def _agreement(kind: Kind, by_judge: Mapping[str, Sequence[Judged]], scale: tuple[int, int]) -> list[dict[str, Any]]:
    """Cohen's kappa of every two judges, over what both have judged; of pairs, verdict by verdict."""
    labels: Sequence[Any] = PAIR_LABELS if kind == "pairwise" else range(scale[0], scale[1] + 1)
    said: dict[str, list[Any]] = {}
    for judge, judged in by_judge.items():
        found = [reply.label for one in judged for reply in one.replies.values()]
        said[judge] = found if kind == "pairwise" else [None if label is None else int(label) for label in found]
    agreement = []
    for first, second in combinations(by_judge, 2):
        both = [pair for pair in zip(said[first], said[second], strict=True) if None not in pair]
        same = sum(a == b for a, b in both)
        weighted = kind != "pairwise"
        agreement.append(
            {
                "judges": [first, second],
                "n": len(both),
                "same_share": same / len(both) if both else None,
                "kappa": statistics.kappa([a for a, _ in both], [b for _, b in both], labels, weighted),
                "weights": "quadratic" if weighted else None,
            }
        )
    return agreement


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
