"""What can be asked about jobs: status, list, one row's answer, the memory receipt, the running workers.

Every answer is a dict with the keys of the command line's `--json`, which the REST API returns as they are.
"""

import json
from typing import Any

from sqlalchemy import Connection, Row, case, func, literal, select

from db.clock import db_now, plain
from db.models import Job, Output, Request, RequestStats, Shard, ThreadNode, Worker
from db.session import Database
from db.states import ENDED, JobState
from jobs.ending import totals
from jobs.errors import BadInput, NotFound
from jobs.messages import storable

MAX_LIST = 1000
MIN_ROWS_FOR_ETA = 8
"""The first answers of a batch come together: fewer rows say nothing of the rest."""
MIN_TOKENS_FOR_RATE = 1000
WORKER_ALIVE_S = 30.0
"""A worker without a heartbeat for this long counts as gone."""

_WAITING = (JobState.QUEUED, JobState.RUNNING)
_JOB_COLUMNS = (
    Job.id, Job.name, Job.state, Job.model, Job.decoding, Job.num_rows, Job.num_completed, Job.num_failed,
    Job.num_cancelled, Job.output_tokens, Job.error, Job.created_at, Job.started_at, Job.finished_at,
    db_now().label("now"),
)  # fmt: skip


def job_status(database: Database, job_id: str) -> dict[str, Any]:
    """One job as in the contract: ids, state, counts, times, `eta_s`, `output_tokens`, `error`.

    Raises:
        NotFound: no such job.
    """
    with database.read() as connection:
        job = connection.execute(select(*_JOB_COLUMNS).where(Job.id == storable(job_id))).one_or_none()
        if job is None:
            raise no_job(job_id)
        sums = job if job.state in ENDED else totals(connection, job_id)
        error = job.error
        if error is None and job.state in _WAITING:
            error = _no_worker(connection, job.model)
    return _status(job, sums, error)


def list_jobs(
    database: Database,
    *,
    limit: int = 50,
    state: str | None = None,
    before: str | None = None,
    tenant: str | None = None,
) -> list[dict[str, Any]]:
    """The newest jobs first, of one tenant or of all; `before` is the job id where the last page ended (ids sort by
    time).

    Raises:
        BadInput: a limit or state that does not exist.
    """
    if not 1 <= limit <= MAX_LIST:
        raise BadInput(f"limit is {limit}: it must be between 1 and {MAX_LIST}")
    if state is not None and state not in list(JobState):
        raise BadInput(f"state is {state!r}: use one of {', '.join(JobState)}")
    statement = select(*_JOB_COLUMNS).order_by(Job.id.desc()).limit(limit)
    if tenant is not None:
        statement = statement.where(Job.tenant == storable(tenant))
    if state is not None:
        statement = statement.where(Job.state == state)
    if before is not None:
        statement = statement.where(Job.id < storable(before))
    with database.read() as connection:
        jobs = connection.execute(statement).all()
        running = [job.id for job in jobs if job.state not in ENDED]
        sums = _sums_by_job(connection, running) if running else {}
        waiting = {job.model for job in jobs if job.state in _WAITING}
        stuck = {model: _no_worker(connection, model) for model in waiting}
    return [
        _status(job, sums.get(job.id, job), job.error or (stuck[job.model] if job.state in _WAITING else None))
        for job in jobs
    ]


def job_detail(database: Database, job_id: str) -> Row[*tuple[Any, ...]]:
    """The whole row of a job, for the export.

    Raises:
        NotFound: no such job.
    """
    with database.read() as connection:
        job = connection.execute(select(Job.__table__).where(Job.id == storable(job_id))).one_or_none()
    if job is None:
        raise no_job(job_id)
    return job


def request_detail(database: Database, job_id: str, row_index: int) -> dict[str, Any]:
    """One row: its state, error, and per sample the answer, the thread tree and the statistics.

    Raises:
        NotFound: no such job or row.
    """
    with database.read() as connection:
        num_rows = connection.execute(select(Job.num_rows).where(Job.id == storable(job_id))).scalar_one_or_none()
        if num_rows is None:
            raise no_job(job_id)
        if not 0 <= row_index < num_rows:
            raise NotFound(f"job {job_id} has no row {row_index}: its rows are 0 to {num_rows - 1}")
        request = connection.execute(
            select(Request.id, Request.row_index, Request.custom_id, Request.state, Request.error_code, Request.error)
            .where(Request.job_id == job_id, Request.row_index == row_index)
        ).one()  # fmt: skip
        outputs, stats, nodes = (
            connection.execute(select(table.__table__).where(table.request_id == request.id).order_by(*order)).all()
            for table, order in (
                (Output, (Output.sample,)),
                (RequestStats, (RequestStats.sample,)),
                (ThreadNode, (ThreadNode.sample, ThreadNode.node)),
            )
        )
    samples = [
        {
            "sample": output.sample,
            "output": output.text,
            "turns": json.loads(output.turns) if output.turns else [],
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.prompt_tokens,
            "output_tokens": output.output_tokens,
            "stats": next((_without_key(row) for row in stats if row.sample == output.sample), None),
            "tree": [_node(row, output.text) for row in nodes if row.sample == output.sample],
        }
        for output in outputs
    ]
    return {
        "job_id": job_id,
        "row": request.row_index,
        "id": request.custom_id,
        "state": request.state,
        "error_code": request.error_code,
        "error": request.error,
        "samples": samples,
    }


_SUMMED = ("threads", "forks", "steps", "peak_cached_tokens", "peak_blocks", "attended_tokens",
           "sequential_peak_tokens", "sequential_attended_tokens", "preemptions")  # fmt: skip
_DRAFTING = {
    "forwards": func.sum(RequestStats.forwards),
    "draft_nodes": func.sum(RequestStats.draft_nodes),
    "verify_nodes": func.sum(RequestStats.verify_nodes),
    "mean_hit_rate": func.avg(RequestStats.hit_rate),
    "mean_acceptance_length": func.avg(RequestStats.acceptance_length),
    "mean_decoding_efficiency": func.avg(RequestStats.decoding_efficiency),
}
"""A decoder's own figures; samples without them do not count."""


def job_stats(database: Database, job_id: str) -> dict[str, Any]:
    """The job's memory receipt: sums over its finished samples, each beside its sequential value, and what was saved;
    and its decoder's own figures, null where the engine has none.

    Raises:
        NotFound: no such job.
    """
    columns = [func.coalesce(func.sum(getattr(RequestStats, name)), 0).label(name) for name in _SUMMED]
    statement = (
        select(
            func.count().label("num_samples"),
            func.coalesce(func.sum(Output.prompt_tokens), 0).label("prompt_tokens"),
            func.coalesce(func.sum(Output.output_tokens), 0).label("output_tokens"),
            func.coalesce(func.sum(Output.cached_tokens), 0).label("cached_prompt_tokens"),
            func.coalesce(func.sum(case((Output.cached_tokens.is_not(None), Output.prompt_tokens), else_=0)), 0).label(
                "cacheable_prompt_tokens"
            ),
            func.coalesce(func.max(RequestStats.max_width), 0).label("max_width"),
            func.coalesce(func.max(RequestStats.threads), 0).label("max_threads"),
            func.coalesce(func.sum(case((RequestStats.forks > 0, 1), else_=0)), 0).label("forked_samples"),
            *columns,
            *(figure.label(name) for name, figure in _DRAFTING.items()),
        )
        .select_from(Request)
        .join(Output, Output.request_id == Request.id)
        .join(RequestStats, (RequestStats.request_id == Output.request_id) & (RequestStats.sample == Output.sample))
        .where(Request.job_id == job_id)
    )
    status = job_status(database, job_id)
    with database.read() as connection:
        row = connection.execute(statement).one()
    sums = {name: int(value) for name, value in row._mapping.items() if name not in _DRAFTING}
    num_cacheable = sums.pop("cacheable_prompt_tokens")  # of engines that say what their cache served
    return {
        "job_id": job_id,
        "state": status["state"],
        "decoding": status["decoding"],
        "counts": status["counts"],
        **sums,
        "prefix_cache_hit_rate": _ratio(sums["cached_prompt_tokens"], num_cacheable),
        "sequential_steps": sums["output_tokens"],
        "mean_threads": _ratio(sums["threads"], sums["num_samples"]),
        "forked_share": _ratio(sums["forked_samples"], sums["num_samples"]),
        **_savings(sums),
        **{name: _figure(row._mapping[name]) for name in _DRAFTING},
    }


_SAVINGS = {
    "peak": ("peak_cached_tokens", "sequential_peak_tokens"),
    "attended": ("attended_tokens", "sequential_attended_tokens"),
    "steps": ("steps", "output_tokens"),
}


def _savings(sums: dict[str, int]) -> dict[str, float | None]:
    """Of each figure, the ratio to its sequential value and the percent saved; None before the first answer."""
    found: dict[str, float | None] = {}
    for name, (here, sequential) in _SAVINGS.items():
        ratio = found[f"{name}_ratio"] = _ratio(sums[here], sums[sequential])
        found[f"{name}_saved_percent"] = None if ratio is None else round(100 * (1 - ratio), 2)
    return found


def measured_tokens_per_s(database: Database, model: str) -> float | None:
    """Output tokens per second of the model's last completed job of some size, or None."""
    statement = (
        select(Job.output_tokens, Job.started_at, Job.finished_at)
        .where(Job.model == model, Job.state == JobState.COMPLETED, Job.output_tokens >= MIN_TOKENS_FOR_RATE)
        .order_by(Job.id.desc())
        .limit(1)
    )
    with database.read() as connection:
        job = connection.execute(statement).one_or_none()
    if job is None or job.started_at is None or job.finished_at is None:
        return None
    seconds: float = (job.finished_at - job.started_at).total_seconds()
    return round(int(job.output_tokens) / max(seconds, 0.001), 1)


def workers(database: Database, *, alive_only: bool = True) -> list[dict[str, Any]]:
    """The worker processes the database knows, on every machine."""
    statement = select(Worker.__table__).order_by(Worker.started_at.desc()).limit(MAX_LIST)
    if alive_only:
        statement = statement.where(Worker.exited_at.is_(None), Worker.heartbeat_at > db_now(literal(-WORKER_ALIVE_S)))
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return [{key: plain(value) for key, value in row._mapping.items()} for row in rows]


def _no_worker(connection: Connection, model: str) -> str | None:
    """Why a job may be standing still: no worker of its model lives. None while one does."""
    alive = Worker.exited_at.is_(None) & (Worker.heartbeat_at > db_now(literal(-WORKER_ALIVE_S)))
    if connection.execute(select(Worker.id).where(Worker.model == model, alive).limit(1)).first() is not None:
        return None
    last = connection.execute(
        select(Worker.exit_reason).where(Worker.model == model).order_by(Worker.heartbeat_at.desc()).limit(1)
    ).first()
    ended = f"; the last one ended with: {last.exit_reason}" if last is not None and last.exit_reason else ""
    return f"no worker serves {model} now: start one with `forq worker --model {model}`{ended}"


def _status(job: Row[*tuple[Any, ...]], sums: Any, error: str | None) -> dict[str, Any]:
    ended = sums.num_completed + sums.num_failed + sums.num_cancelled
    eta_s = None
    enough = min(max(1, job.num_rows // 10), MIN_ROWS_FOR_ETA)
    if job.state == JobState.RUNNING and job.started_at is not None and sums.num_completed >= enough:
        elapsed_s = (job.now - job.started_at).total_seconds()
        eta_s = round(elapsed_s * (job.num_rows - ended) / sums.num_completed, 1)
    return {
        "job_id": job.id,
        "name": job.name,
        "state": job.state,
        "model": job.model,
        "decoding": job.decoding,
        "counts": {
            "total": job.num_rows,
            "completed": int(sums.num_completed),
            "failed": int(sums.num_failed),
            "cancelled": int(sums.num_cancelled),
        },
        "created_at": plain(job.created_at),
        "started_at": plain(job.started_at),
        "finished_at": plain(job.finished_at),
        "eta_s": eta_s,
        "output_tokens": int(sums.output_tokens),
        "error": error,
    }


def _sums_by_job(connection: Connection, job_ids: list[str]) -> dict[str, Any]:
    columns = (Shard.num_completed, Shard.num_failed, Shard.num_cancelled, Shard.output_tokens)
    sums = [func.sum(column).label(column.key) for column in columns]
    rows = connection.execute(select(Shard.job_id, *sums).where(Shard.job_id.in_(job_ids)).group_by(Shard.job_id))
    return {row.job_id: row for row in rows}


def no_job(job_id: str) -> NotFound:
    """One text for a job that is not there and one that is not the asker's: they must not be told apart."""
    return NotFound(f"no job {job_id}: `forq list` shows those there are")


def _ratio(value: int, sequential: int) -> float | None:
    return round(value / sequential, 4) if sequential else None


def _figure(value: Any) -> int | float | None:
    """A sum or a mean as Python has it: databases give sums as Decimal, too."""
    if value is None or isinstance(value, int):
        return value
    return round(value, 4) if isinstance(value, float) else int(value)


def _node(row: Row[*tuple[Any, ...]], output: str) -> dict[str, Any]:
    return {**_without_key(row), "text": output[row.text_start : row.text_end]}


def _without_key(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    return {key: value for key, value in row._mapping.items() if key not in ("request_id", "sample")}
