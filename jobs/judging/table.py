"""The judged table: one row per judged item, turn and judge, whatever became of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import store
from jobs.judging.items import Item
from jobs.judging.probabilities import Probabilities, probabilities
from jobs.judging.rubrics import Kind
from jobs.judging.verdicts import ReplyForm, parse

_OWN = [("judge", pa.string()), ("row", pa.int64()), ("turn", pa.int8()), ("id", pa.string()),
        ("category", pa.string())]  # fmt: skip
_PROBABILITIES = pa.list_(pa.struct([("label", pa.string()), ("probability", pa.float64())]))
_OF_REPLY = [("problem", pa.string()), ("reply", pa.string()), ("error_code", pa.string()), ("error", pa.string()),
             ("probabilities", _PROBABILITIES), ("probability_mass", pa.float64()), ("prompt_tokens", pa.int32()),
             ("cached_tokens", pa.int32())]  # fmt: skip
SCORE_SCHEMA = pa.schema(
    [*_OWN, ("model", pa.string()), ("score", pa.int32()), ("expected_score", pa.float64()), *_OF_REPLY]
)
PAIR_SCHEMA = pa.schema(
    [
        *_OWN, ("row_b", pa.int64()), ("model_a", pa.string()), ("model_b", pa.string()), ("outcome", pa.string()),
        ("flipped", pa.bool_()), ("verdict_ab", pa.string()), ("verdict_ba", pa.string()),
        ("win_probability_a", pa.float64()),
        *[(f"{name}_{order}", kind) for order in ("ab", "ba") for name, kind in _OF_REPLY],
    ]
)  # fmt: skip
NOT_ASKED, NOT_ANSWERED = "not_asked", "not_answered"
"""Codes beside those of the service: the row could not be judged; the job has not come to it."""
_WINNER = {"ab": {"A": "a", "B": "b", "tie": "tie"}, "ba": {"A": "b", "B": "a", "tie": "tie"}}


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one question to the judge."""

    label: str | None = None
    problem: str | None = None
    text: str | None = None
    error_code: str | None = None
    error: str | None = None
    of: Probabilities | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def state(self) -> str:
        """`judged`, `null` or `failed`."""
        return "judged" if self.label is not None else "null" if self.error_code is None else "failed"

    def columns(self) -> dict[str, Any]:
        told = None if self.of is None else [{"label": k, "probability": v} for k, v in self.of.of.items()]
        return {
            "problem": self.problem,
            "reply": self.text,
            "error_code": self.error_code,
            "error": self.error,
            "probabilities": told,
            "probability_mass": self.of and self.of.mass,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


def read_reply(row: Mapping[str, Any], form: ReplyForm) -> Reply:
    """Of one exported row of the judge's job."""
    counted = {"prompt_tokens": row["forq_prompt_tokens"], "cached_tokens": row["forq_cached_tokens"]}
    if row["forq_output"] is None:
        code = row["forq_error_code"] or NOT_ANSWERED
        return Reply(error_code=code, error=row["forq_error"] or "the job has not answered this row", **counted)
    text: str = row["forq_output"]
    verdict = parse(text, form, row["forq_finish_reason"])
    told = None
    if verdict.label is not None:
        told = probabilities(row.get("forq_logprobs"), verdict.label, form)
    return Reply(verdict.label, verdict.problem, text, of=told, **counted)


@dataclass(frozen=True, slots=True)
class Judged:
    """An item with its replies: one, or of a pair one in each order."""

    judge: str
    item: Item
    turn: int
    replies: dict[str | None, Reply] = field(default_factory=dict)

    @property
    def score(self) -> int | None:
        label = self.replies[None].label
        return None if label is None else int(label)

    @property
    def expected_score(self) -> float | None:
        told = self.replies[None].of
        return None if told is None else told.expected

    def winner(self, order: str) -> str | None:
        """Of a pair: `a`, `b` or `tie`, by what was said in this order."""
        label = self.replies[order].label
        return None if label is None else _WINNER[order][label]

    @property
    def flipped(self) -> bool | None:
        """Of a pair: the two orders disagree. None where one of them gave no verdict."""
        ab, ba = self.winner("ab"), self.winner("ba")
        return None if ab is None or ba is None else ab != ba

    def outcome(self, inconsistent: str) -> str | None:
        """Of a pair: who won in both orders; else a tie, or nothing, as `inconsistent` says."""
        if self.flipped is None:
            return None
        if self.flipped:
            return "tie" if inconsistent == "tie" else None
        return self.winner("ab")

    @property
    def win_probability_a(self) -> float | None:
        """Of a pair: how probable the judge holds A to win, a tie counting half, over both orders."""
        found = []
        for order, first in (("ab", "A"), ("ba", "B")):
            told = self.replies[order].of
            if told is None:
                return None
            found.append(told.of[first] + told.of["tie"] / 2)
        return sum(found) / 2


def collect(
    judge: str,
    kind: Kind,
    items: Sequence[Item],
    turns: Sequence[int],
    replies: Mapping[tuple[int, int, str | None], Reply],
) -> list[Judged]:
    """All items in their own order, those that were not asked included."""
    orders: tuple[str | None, ...] = ("ab", "ba") if kind == "pairwise" else (None,)

    def reply(number: int, item: Item, turn: int, order: str | None) -> Reply:
        if item.error is not None:
            return Reply(error_code=NOT_ASKED, error=item.error)
        missing = Reply(error_code=NOT_ANSWERED, error="the job has not answered this row")
        return replies.get((number, turn, order), missing)

    return [
        Judged(judge, item, turn, {order: reply(number, item, turn, order) for order in orders})
        for number, item in enumerate(items)
        for turn in turns
    ]


def as_row(judged: Judged, kind: Kind, inconsistent: str) -> dict[str, Any]:
    item = judged.item
    row = {"judge": judged.judge, "row": item.row, "turn": judged.turn, "id": item.id, "category": item.category}
    if kind != "pairwise":
        scores = {"model": item.model, "score": judged.score, "expected_score": judged.expected_score}
        return {**row, **scores, **judged.replies[None].columns()}
    both = {
        f"{name}_{order}": value
        for order in ("ab", "ba")
        for name, value in judged.replies[order].columns().items()
    }  # fmt: skip
    return {
        **row,
        "row_b": item.row_b,
        "model_a": item.model,
        "model_b": item.model_b,
        "outcome": judged.outcome(inconsistent),
        "flipped": judged.flipped,
        "verdict_ab": judged.replies["ab"].label,
        "verdict_ba": judged.replies["ba"].label,
        "win_probability_a": judged.win_probability_a,
        **both,
    }


def write_table(judged: Iterable[Judged], kind: Kind, inconsistent: str, path: Path) -> None:
    """Write `results.parquet`, whole or not at all."""
    schema = PAIR_SCHEMA if kind == "pairwise" else SCORE_SCHEMA
    temporary = store.temporary_beside(path)
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd", write_statistics=False) as writer:
            rows: list[dict[str, Any]] = []
            for one in judged:
                rows.append(as_row(one, kind, inconsistent))
                if len(rows) == 4096:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
        store.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
