"""The export route: a job's results to a URL under one of the storage roots, for files no client wants to carry."""

from pathlib import Path
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Body, Request

from api.access import CallerDep, KeyFirstRoute
from api.dependencies import DatabaseDep, JobIdDep, LongWorkDep, SettingsDep
from api.forms import ExportForm
from api.longwork import Progress
from api.problems import responses
from api.results import write_results
from api.schemas import ExportedFile
from jobs.export import format_of
from jobs.remote.files import output_file
from jobs.remote.urls import parse_url

log = structlog.get_logger()
router = APIRouter(
    prefix="/v1/jobs",
    tags=["results"],
    route_class=KeyFirstRoute,
    responses=responses(401, 403, 413, 422, 429, 500, 503),
)


@router.post(
    "/{job_id}/export",
    operation_id="export_job",
    summary="Results to object storage",
    response_model=ExportedFile,
    responses=responses(400, 404),
)
async def export_results(
    request: Request,
    settings: SettingsDep,
    database: DatabaseDep,
    long_work: LongWorkDep,
    caller: CallerDep,
    job_id: JobIdDep,
    form: Annotated[ExportForm, Body()],
) -> Any:
    """Write what there is to a URL, also while the job runs. The object appears when it is whole, and replaces one of
    its name; the answer comes then, too. If the connection breaks before, nothing is written.
    """
    url = parse_url(form.url)
    format = form.format or format_of(Path(url.name))

    def export(progress: Progress) -> int:
        with output_file(settings, url, progress, tenant=caller.only_tenant) as path:
            return write_results(database, settings, job_id, path, format, form, progress)

    num_rows = await long_work.run(request, export)
    log.info("job_exported", job=job_id, rows=num_rows, key=caller.key_id)
    return {"job_id": job_id, "url": str(url), "format": format, "rows": num_rows}
