"""A job's rows as lines of OpenAI's batch output: answers as the bodies of their endpoint, all else as error lines.

Lines come in input order, a page of rows at a time, so that memory does not grow with the job. They need the database
alone, not the submitted file.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Row, select

from db.models import Output, Request, RequestStats
from db.session import Database
from db.states import RequestState
from jobs.service import job_detail

PAGE_ANSWERS = 256
"""Answers of one page at most, where rows have as many as the job says."""
_RAW_END = '"raw": true}'
"""How the payload of a completion ends (jobs/batch_bodies.py, json.dumps): no text of a prompt can, its quotes are
escaped."""
_STATS = [column for column in RequestStats.__table__.columns if column.name not in ("request_id", "sample")]
_SERVER_FAULTS = frozenset({"poison", "engine_error", "job_failed"})
"""Codes of rows that failed without a fault of theirs; any other is a request that cannot be answered as it is."""

NEVER_LOGPROB = -9999.0
_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\u0085\u2028\u2029"}
"""Python's `splitlines`, which clients use, splits at these, too; in JSON they only stand in texts."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Line:
    row_index: int
    text: str
    """JSON, without the line's end."""
    is_answer: bool
    """Else it is an error line."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """What an error line says of rows that were given up."""

    code: str
    message: str


CANCELLED = Unanswered("batch_cancelled", "the batch was cancelled before this request was answered")
EXPIRED = Unanswered("batch_expired", "the batch's completion window ended before this request was answered")


def iter_lines(
    database: Database,
    job_id: str,
    unanswered: Unanswered = CANCELLED,
    *,
    failed_only: bool = False,
    progress: Progress | None = None,
) -> Iterator[Line]:
    """Yield a line per row that has ended, in input order; of rows that have not, none.

    Raises:
        NotFound: no such job.
    """
    job = job_detail(database, job_id)
    page_rows = max(1, PAGE_ANSWERS // int(job.sampling.get("n") or 1))
    created = int((job.started_at or job.created_at).timestamp())
    for start in range(0, job.num_rows, page_rows):
        for row, samples in _page(database, job_id, start, page_rows):
            if row.state == RequestState.COMPLETED and not failed_only:
                yield _answer(job, row, samples, created)
            elif row.state == RequestState.FAILED:
                yield Line(row.row_index, _failure(job, row), is_answer=False)
            elif row.state == RequestState.CANCELLED:
                error = {"code": unanswered.code, "message": unanswered.message}
                yield Line(row.row_index, _line(job, row, None, error), is_answer=False)
        if progress is not None:
            progress("exporting", min(start + page_rows, job.num_rows), job.num_rows)


def write_lines(
    database: Database, job_id: str, target: Path, *, failed_only: bool = False, progress: Progress | None = None
) -> int:
    """All lines in one file, as `vllm run-batch` writes them; returns their number."""
    num_lines = 0
    with target.open("w", encoding="utf-8") as file:
        for line in iter_lines(database, job_id, failed_only=failed_only, progress=progress):
            file.write(line.text + "\n")
            num_lines += 1
    return num_lines


def _page(
    database: Database, job_id: str, start: int, num_rows: int
) -> Iterator[tuple[Row[*tuple[Any, ...]], list[Row[*tuple[Any, ...]]]]]:
    mine = (Request.job_id == job_id) & (Request.row_index >= start) & (Request.row_index < start + num_rows)
    is_raw = Request.payload.endswith(_RAW_END, autoescape=True).label("is_raw")
    asked = select(
        Request.id, Request.row_index, Request.custom_id, Request.state, Request.error_code, Request.error,
        Request.payload.is_(None).label("is_refused"), is_raw,
    )  # fmt: skip
    answered = (
        select(Output.__table__, *_STATS)
        .join(Request, Request.id == Output.request_id)
        .outerjoin(
            RequestStats, (RequestStats.request_id == Output.request_id) & (RequestStats.sample == Output.sample)
        )
    )
    samples = defaultdict(list)
    with database.read() as connection:
        # The rows first: one that ends between the two statements has no line yet, rather than a line without answers.
        rows = connection.execute(asked.where(mine).order_by(Request.row_index)).all()
        for row in connection.execute(answered.where(mine).order_by(Output.request_id, Output.sample)):
            samples[row.request_id].append(row)
    for row in rows:
        yield row, samples[row.id]


def _answer(job: Row[*tuple[Any, ...]], row: Row[*tuple[Any, ...]], samples: list[Any], created: int) -> Line:
    input_tokens = samples[0].prompt_tokens if samples else 0
    cached_tokens = sum(sample.cached_tokens or 0 for sample in samples[:1])
    output_tokens = sum(sample.output_tokens for sample in samples)
    body = {
        "id": f"{'cmpl' if row.is_raw else 'chatcmpl'}-{job.id}-{row.row_index}",
        "object": "text_completion" if row.is_raw else "chat.completion",
        "created": created,
        "model": job.model,
        "choices": [(_text_choice if row.is_raw else _chat_choice)(sample) for sample in samples],
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "forq": {"decoding": job.decoding, "receipts": [_receipt(sample) for sample in samples]},
    }
    text = _line(job, row, _response(job, row, 200, body), None)
    return Line(row.row_index, text, True, input_tokens, cached_tokens, output_tokens)


def _chat_choice(sample: Any) -> dict[str, Any]:
    return {
        "index": sample.sample,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": _chat_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
    }


def _text_choice(sample: Any) -> dict[str, Any]:
    return {
        "index": sample.sample,
        "text": sample.text,
        "logprobs": _text_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
    }


def _receipt(sample: Any) -> dict[str, Any] | None:
    """The memory receipt; null where the engine gave none."""
    if sample.threads is None:
        return None
    return {name: value for name in (c.name for c in _STATS) if (value := sample._mapping[name]) is not None}


def _failure(job: Row[*tuple[Any, ...]], row: Row[*tuple[Any, ...]]) -> str:
    is_ours = row.error_code in _SERVER_FAULTS and not row.is_refused
    error = {
        "message": row.error or "the request failed",
        "type": "server_error" if is_ours else "invalid_request_error",
        "param": None,
        "code": row.error_code,
    }
    return _line(job, row, _response(job, row, 500 if is_ours else 400, {"error": error}), None)


def _response(job: Row[*tuple[Any, ...]], row: Row[*tuple[Any, ...]], status: int, body: Any) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{job.id}_{row.row_index}", "body": body}


def _line(job: Row[*tuple[Any, ...]], row: Row[*tuple[Any, ...]], response: Any, error: Any) -> str:
    """Ids are made of job and row: a line written again is the same line."""
    custom_id = row.custom_id if row.custom_id is not None else f"row-{row.row_index}"
    line = {
        "id": f"batch_req_{job.id}_{row.row_index}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(line, ensure_ascii=False, allow_nan=False).translate(_SEPARATORS)


def _chat_logprobs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    content = [{**_token(told), "top_logprobs": [_token(one) for one in told["top"]]} for told in json.loads(text)]
    return {"content": content, "refusal": None}


def _token(told: dict[str, Any]) -> dict[str, Any]:
    return {"token": told["token"], "logprob": _told(told["logprob"]), "bytes": list(told["token"].encode())}


def _text_logprobs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    tokens = json.loads(text)
    offsets, offset = [], 0
    for told in tokens:
        offsets.append(offset)
        offset += len(told["token"])
    return {
        "tokens": [told["token"] for told in tokens],
        "token_logprobs": [_told(told["logprob"]) for told in tokens],
        "top_logprobs": [{one["token"]: _told(one["logprob"]) for one in told["top"]} for told in tokens],
        "text_offset": offsets,
    }


def _told(logprob: float | None) -> float:
    """OpenAI's number for a token that is as good as impossible; JSON has no infinity."""
    return NEVER_LOGPROB if logprob is None else logprob
