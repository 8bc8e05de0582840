"""Routes of a job's life: submit, list, status with long poll, cancel, retry, one row, the memory receipt."""

import hashlib
import json
from dataclasses import replace
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, BackgroundTasks, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from api.access import CallerDep
from api.dependencies import DatabaseDep, JobIdDep, LongWorkDep, SettingsDep, WatchDep
from api.forms import REPEATED, ListQuery, StatusQuery, SubmitForm, read_form
from api.longwork import Progress
from api.problems import responses
from api.schemas import JobList, JobStats, JobStatus, RequestDetail, RetriedJob, with_file
from api.scratch import scratch_dir
from api.upload import receive_upload
from db.states import ENDED, JobState
from jobs import ending, idempotency, service
from jobs.doorbell import MAX_RINGS, ring
from jobs.remote.files import input_file
from jobs.remote.urls import parse_url
from jobs.submit import Submitted, check_options, submit_file

MAX_ROW = (1 << 63) - 1  # the database's integers
_ETAG_HEADER = {"ETag": {"description": "Changes with the status.", "schema": {"type": "string"}}}
_LOCATION_HEADER = {"Location": {"description": "The job's status.", "schema": {"type": "string"}}}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": f"^[!-~]{{1,{idempotency.MAX_KEY_CHARS}}}$"},
    "description": "Of your own choice, one for each job: the same key again is the same job, 409 where it differs.",
}

log = structlog.get_logger()
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=responses(401, 403, 422, 429, 500, 503))


@router.post(
    "",
    operation_id="submit_job",
    summary="Submit a file of prompts",
    status_code=201,
    response_model=JobStatus,
    responses={201: {"description": "Queued.", "headers": _LOCATION_HEADER}, **responses(400, 409, 413, 415)},
    openapi_extra={"requestBody": with_file(SubmitForm), "parameters": [_IDEMPOTENCY_KEY]},
)
async def submit_job(
    request: Request,
    response: Response,
    settings: SettingsDep,
    database: DatabaseDep,
    long_work: LongWorkDep,
    caller: CallerDep,
    background: BackgroundTasks,
) -> Any:
    """Upload a Parquet file, or OpenAI batch JSONL (`.jsonl`), and queue a request per row.

    The file is checked as a whole before anything is stored. A bad row does not refuse it: that row ends with an error.
    If the connection breaks before the answer, nothing is stored. Where that cannot be known, send it again with the
    same `Idempotency-Key`: it is then the same job.
    """
    key = request.headers.get("idempotency-key")
    if key is not None:
        idempotency.check_key(key)
    limit = settings.limits.max_upload_bytes
    async with receive_upload(request, scratch_dir(settings), limit, REPEATED) as upload:
        form = read_form(SubmitForm, {**upload.fields, **upload.lists})
        options = replace(form.options(settings, caller.tenant), idempotency_key=key)
        location = upload.path if form.url is None else parse_url(form.url)
        assert location is not None, "receive_upload saw a file or a url"

        def submit(progress: Progress) -> Submitted:
            check_options(settings, options)  # before anything is fetched
            with input_file(settings, location, progress, tenant=caller.only_tenant) as path:
                return submit_file(database, settings, path, options, progress)

        submitted = await long_work.run(request, submit)
    # Rung after the answer: a broker that cannot be reached would delay it, and workers look by themselves anyway.
    background.add_task(ring, settings, submitted.model, submitted.num_shards)
    log.info(
        "job_submitted", job=submitted.job_id, model=submitted.model, rows=submitted.num_rows, source="api",
        tenant=caller.tenant, key=caller.key_id,
    )  # fmt: skip
    response.headers["Location"] = request.url_for("get_job", job_id=submitted.job_id).path
    return await run_in_threadpool(service.job_status, database, submitted.job_id)


@router.get("", operation_id="list_jobs", summary="List jobs, newest first", response_model=JobList)
def list_jobs(database: DatabaseDep, caller: CallerDep, query: Annotated[ListQuery, Query()]) -> Any:
    """Page through jobs: pass the last page's `next_before` as `before`."""
    jobs = service.list_jobs(
        database, limit=query.limit, state=query.state, before=query.before, tenant=caller.only_tenant
    )
    return {"jobs": jobs, "next_before": jobs[-1]["job_id"] if len(jobs) == query.limit else None}


@router.get(
    "/{job_id}",
    operation_id="get_job",
    summary="A job's status, at once or when it changes",
    response_model=JobStatus,
    responses={
        200: {"description": "The status.", "headers": _ETAG_HEADER},
        304: {"description": "Still what `If-None-Match` names.", "headers": _ETAG_HEADER},
        **responses(404),
    },
    openapi_extra={
        "parameters": [
            {"name": "If-None-Match", "in": "header", "required": False, "schema": {"type": "string"},
             "description": "The ETag of the status you have."},
        ]
    },
)  # fmt: skip
async def get_job(
    request: Request, response: Response, watch: WatchDep, job_id: JobIdDep, query: Annotated[StatusQuery, Query()]
) -> Any:
    """Ask for the status, or wait for news of it.

    `wait` with `If-None-Match` answers as soon as the status is another than the one you have, or 304 when the time is
    over. `wait` alone answers when the job has ended, or with the status as it is when the time is over.
    """
    known = request.headers.get("if-none-match")

    def is_news(status: dict[str, Any]) -> bool:
        return status["state"] in ENDED if known is None else not _matches(known, etag_of(status))

    status = await watch.status_when(job_id, is_news, query.wait, request.is_disconnected)
    headers = {"ETag": etag_of(status), "Cache-Control": "no-cache"}
    if known is not None and not is_news(status):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return status


@router.post(
    "/{job_id}/cancel",
    operation_id="cancel_job",
    summary="Stop a job",
    response_model=JobStatus,
    responses={
        200: {"description": "Cancelled."},
        202: {"description": "Cancelling: workers are letting go of its rows.", "model": JobStatus},
        **responses(404, 409),
    },
)
def cancel_job(response: Response, database: DatabaseDep, caller: CallerDep, job_id: JobIdDep) -> Any:
    """Finished rows keep their answers; a job that has ended cannot be cancelled (409)."""
    state = ending.cancel(database, job_id)
    log.info("job_cancelled", job=job_id, state=state, key=caller.key_id)
    if state == JobState.CANCELLING:
        response.status_code = 202
    return service.job_status(database, job_id)


@router.post(
    "/{job_id}/retry",
    operation_id="retry_job",
    summary="Ask a job's failed rows again",
    response_model=RetriedJob,
    responses=responses(404, 409),
)
def retry_job(
    settings: SettingsDep, database: DatabaseDep, caller: CallerDep, job_id: JobIdDep, background: BackgroundTasks
) -> Any:
    """Only failed rows run again; those refused at submit cannot. 409 while the job runs, or when there are none."""
    num_rows = ending.retry(database, job_id)
    status = service.job_status(database, job_id)
    background.add_task(ring, settings, status["model"], min(num_rows, MAX_RINGS))
    log.info("job_retried", job=job_id, rows=num_rows, key=caller.key_id)
    return {**status, "retried": num_rows}


@router.get(
    "/{job_id}/requests/{row}",
    operation_id="get_request",
    summary="One row's answers, thread trees and statistics",
    response_model=RequestDetail,
    responses=responses(404),
)
def get_request(
    database: DatabaseDep,
    job_id: JobIdDep,
    row: Annotated[int, Path(ge=0, le=MAX_ROW, description="The row's index in the file, from 0.", examples=[0])],
) -> Any:
    return service.request_detail(database, job_id, row)


@router.get(
    "/{job_id}/stats",
    operation_id="get_job_stats",
    summary="The job's memory receipt",
    response_model=JobStats,
    responses=responses(404),
)
def get_job_stats(database: DatabaseDep, job_id: JobIdDep) -> Any:
    """Threads, peak cached tokens, attended tokens and steps, each beside its sequential value."""
    return service.job_stats(database, job_id)


def etag_of(status: dict[str, Any]) -> str:
    """An ETag over all that is news: `eta_s` counts down by itself, so it stays out."""
    content = json.dumps({key: value for key, value in status.items() if key != "eta_s"}, sort_keys=True)
    return f'"{hashlib.sha256(content.encode()).hexdigest()[:32]}"'


def _matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110, section 13.1.2: weak comparison with any of a list, or `*`."""
    known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in known or etag in known
