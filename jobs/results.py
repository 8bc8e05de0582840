"""The write path: finished rows of a leased shard, in one fenced transaction; and the rows still to do."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import insert, select, update

from db.models import Job, Output, Request, RequestStats, Shard, ThreadNode
from db.session import Database
from db.states import RequestState
from jobs.errors import LeaseLost
from jobs.leases import Lease, fenced
from jobs.messages import storable, storable_error
from jobs.sampling import MAX_SEED, Sampling

UPDATE_ROWS = 4096
"""Ids in one statement: databases limit its parameters (SQLite to 32,766)."""


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A row to generate."""

    request_id: int
    row_index: int
    payload: dict[str, Any]
    sampling: Sampling
    """The row's own values over the job's."""
    attempts: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The memory receipt of one sample; exact definitions in docs/statistics.md."""

    threads: int
    forks: int
    max_width: int
    steps: int
    peak_cached_tokens: int
    peak_blocks: int
    attended_tokens: int
    sequential_peak_tokens: int
    sequential_attended_tokens: int
    preemptions: int
    forwards: int | None = None
    hit_rate: float | None = None
    acceptance_length: float | None = None
    decoding_efficiency: float | None = None
    draft_nodes: int | None = None
    verify_nodes: int | None = None
    """From `forwards` on: the decoder's own figures; None from vLLM, which has none."""


@dataclass(frozen=True, slots=True)
class Node:
    """A paragraph node: its span [start, end) in tokens of the restored output and its first and last engine step."""

    node: int
    parent: int | None
    kind: str
    thread: int
    start: int
    end: int
    first_step: int
    last_step: int
    text_start: int
    text_end: int
    """The same span in characters of the output's text: the texts of all nodes, in order, are the output."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer before a sample's last one."""

    content: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SampleResult:
    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    stats: Stats | None
    """None where the engine gave no receipt: an operator's own scheduler."""
    nodes: tuple[Node, ...]
    turns: tuple[Turn, ...] = ()
    """The answers before this one, of a row with several turns; everything else here is of the last."""
    logprobs: str | None = None
    """JSON, where they were asked for: of each token its text (`token`), its `logprob`, and the likeliest ones at its
    place (`top`)."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the engine's prefix cache served; None where it does not say."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """How one row ended: with its samples, or with an error."""

    request_id: int
    samples: tuple[SampleResult, ...] = field(default=())
    error_code: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ShardWork:
    decoding: str
    job_state: str
    rows: list[PendingRow]
    kv_share: float | None = None


def load(database: Database, lease: Lease) -> ShardWork:
    """The rows of a leased shard that have not ended."""
    with database.read() as connection:
        job = connection.execute(
            select(Job.sampling, Job.decoding, Job.state, Job.kv_share).where(Job.id == lease.job_id)
        ).one()
        rows = connection.execute(
            select(Request.id, Request.row_index, Request.payload, Request.sampling, Request.attempts)
            .where(
                Request.job_id == lease.job_id,
                Request.row_index >= lease.start_row,
                Request.row_index < lease.end_row,
                Request.state == RequestState.QUEUED,
            )
            .order_by(Request.row_index)
        ).all()
    base = Sampling.model_validate(job.sampling)
    pending = [
        PendingRow(
            request_id=row.id,
            row_index=row.row_index,
            payload=json.loads(row.payload),
            sampling=_row_sampling(base, row.sampling, row.row_index),
            attempts=row.attempts,
        )
        for row in rows
    ]
    return ShardWork(job.decoding, job.state, pending, job.kv_share)


def _row_sampling(base: Sampling, own_json: str | None, row_index: int) -> Sampling:
    """The row's values over the job's. A job's seed becomes another one in every row, or like prompts would get like
    answers; a row's own seed is taken as it is."""
    own = Sampling.model_validate_json(own_json) if own_json else Sampling()
    merged = own.over(base)
    if own.seed is not None or base.seed is None:
        return merged
    return merged.model_copy(update={"seed": (base.seed + row_index * (merged.n or 1)) % MAX_SEED})


def write(database: Database, lease: Lease, results: list[RowResult]) -> None:
    """Store finished rows: outputs, statistics, trees, row states and the shard's counters, all or nothing.

    Raises:
        LeaseLost: the lease is another's now, or a row has ended already; nothing was stored.
    """
    if not results:
        return
    completed = [result for result in results if result.error_code is None]
    failed = [result for result in results if result.error_code is not None]
    outputs, stats, nodes = _rows_of(completed)
    with database.write() as connection:
        # The fence comes first: on PostgreSQL it also locks the shard against the sweeper until the commit.
        owned = connection.execute(
            update(Shard)
            .where(fenced(lease))
            .values(
                num_completed=Shard.num_completed + len(completed),
                num_failed=Shard.num_failed + len(failed),
                output_tokens=Shard.output_tokens + sum(row["output_tokens"] for row in outputs),
            )
        ).rowcount
        if owned != 1:
            raise LeaseLost(f"{lease}: another worker owns it now")
        mine = (
            (Request.job_id == lease.job_id)
            & (Request.row_index >= lease.start_row)
            & (Request.row_index < lease.end_row)
            & (Request.state == RequestState.QUEUED)
        )
        ended = 0
        for start in range(0, len(completed), UPDATE_ROWS):
            ids = [row.request_id for row in completed[start : start + UPDATE_ROWS]]
            ended += connection.execute(
                update(Request).where(Request.id.in_(ids), mine).values(state=RequestState.COMPLETED)
            ).rowcount
        for row in failed:
            ended += connection.execute(
                update(Request)
                .where(Request.id == row.request_id, mine)
                .values(state=RequestState.FAILED, error_code=row.error_code, error=storable_error(row.error or ""))
            ).rowcount
        # Checked before the outputs are inserted: a row that had ended would show as a broken primary key there.
        if ended != len(results):
            raise LeaseLost(f"{lease}: {len(results) - ended} of {len(results)} rows had ended already")
        for table, rows in ((Output, outputs), (RequestStats, stats), (ThreadNode, nodes)):
            if rows:
                connection.execute(insert(table), rows)


def count_attempt(database: Database, lease: Lease, row: PendingRow) -> None:
    """Note, before a suspect row enters the engine alone, that it did: if the worker dies, the row is found out.

    Raises:
        LeaseLost: the lease is another's now.
    """
    with database.write() as connection:
        owned = connection.execute(select(Shard.id).where(fenced(lease)).with_for_update()).first()
        if owned is None:
            raise LeaseLost(f"{lease}: another worker owns it now")
        connection.execute(update(Request).where(Request.id == row.request_id).values(attempts=Request.attempts + 1))


def take_attempt_back(database: Database, row: PendingRow) -> None:
    """Undo one `count_attempt`: the worker stopped of its own will. Needs no fence, being a difference."""
    with database.write() as connection:
        connection.execute(
            update(Request)
            .where(Request.id == row.request_id, Request.attempts > 0)
            .values(attempts=Request.attempts - 1)
        )


def _rows_of(completed: list[RowResult]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    outputs: list[dict[str, Any]] = []
    stats: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    for result in completed:
        for number, sample in enumerate(result.samples):
            key = {"request_id": result.request_id, "sample": number}
            outputs.append(
                {
                    **key,
                    "text": storable(sample.text),
                    "finish_reason": sample.finish_reason,
                    "prompt_tokens": sample.prompt_tokens,
                    "output_tokens": sample.output_tokens,
                    "turns": _turns_json(sample.turns),
                    "logprobs": sample.logprobs,
                    "cached_tokens": sample.cached_tokens,
                }
            )
            if sample.stats is not None:
                stats.append({**key, **asdict(sample.stats)})
            nodes.extend({**key, **asdict(node)} for node in sample.nodes)
    return outputs, stats, nodes


def _turns_json(turns: tuple[Turn, ...]) -> str | None:
    found = [{**asdict(turn), "content": storable(turn.content)} for turn in turns]
    return json.dumps(found, ensure_ascii=False) if found else None
