"""Records of single runs, one JSON line each, and the figures of each decoder and category that follow from them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apar.decoding import DecodingResult


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt decoded by one decoder."""

    row: int
    category: str
    decoder: str
    compared_with: str
    token_ids: list[int]
    forwards: int
    thread_steps: int
    hits: int
    accepted: int
    draft_nodes: int
    verify_nodes: int
    threads: int
    prefill_s: float
    decode_s: float
    """All forwards but the first, which is the prompt's."""


def record_of(row: int, category: str, decoder: str, compared_with: str, seconds: tuple[float, float],
              result: DecodingResult) -> Record:  # fmt: skip
    return Record(
        row=row,
        category=category,
        decoder=decoder,
        compared_with=compared_with,
        token_ids=result.token_ids,
        threads=len(result.threads),
        prefill_s=round(seconds[0], 4),
        decode_s=round(seconds[1], 4),
        **asdict(result.drafting),
    )


def read(files: Iterable[Path]) -> list[Record]:
    return [Record(**json.loads(line)) for file in files for line in file.read_text("utf-8").splitlines()]


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One entry per decoder and category, and `all` for all rows together.

    Sums come before ratios: `de` is all tokens over all forwards, `al` all accepted drafts over all hits. Without time
    for the prompt, as the APAR paper counts speed (appendix C.1), `tokens_per_s` leaves each answer's first token out.
    """
    decoders = list(dict.fromkeys(record.decoder for record in records))
    categories = [*dict.fromkeys(record.category for record in records), "all"]
    answers = {(record.decoder, record.row): record.token_ids for record in records}
    rows = []
    for decoder in decoders:
        for category in categories:
            mine = [r for r in records if r.decoder == decoder and category in (r.category, "all")]
            if mine:
                rows.append(_entry(decoder, category, mine, answers))
    speeds = {row["category"]: row["tokens_per_s"] for row in rows if row["decoder"] == "ar"}
    for row in rows:
        base = speeds.get(row["category"])
        row["speedup"] = round(row["tokens_per_s"] / base, 3) if base else None
    return rows


def _entry(
    decoder: str, category: str, records: Sequence[Record], answers: dict[tuple[str, int], list[int]]
) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(getattr(record, name) for record in records)

    tokens = sum(len(record.token_ids) for record in records)
    seconds = sum(record.decode_s for record in records)
    hits, thread_steps, forwards = total("hits"), total("thread_steps"), total("forwards")
    compared = [record for record in records if (record.compared_with, record.row) in answers]
    same = sum(record.token_ids == answers[record.compared_with, record.row] for record in compared)
    return {
        "decoder": decoder,
        "category": category,
        "rows": len(records),
        "tokens": tokens,
        "forwards": forwards,
        "de": round(tokens / forwards, 3),
        "hr": round(hits / thread_steps, 3),
        "al": round(1 + total("accepted") / hits, 3) if hits else 1.0,
        "threads": round(total("threads") / len(records), 2),
        "tokens_per_s": round((tokens - len(records)) / seconds, 2) if seconds else 0.0,
        "draft_nodes": total("draft_nodes"),
        "verify_nodes": total("verify_nodes"),
        "nodes_per_step": round((total("draft_nodes") + total("verify_nodes")) / thread_steps, 1),
        "identical": same == len(compared) if compared else None,
        "rows_identical": same if compared else None,
    }
