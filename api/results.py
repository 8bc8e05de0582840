"""The results route: an export, made whole on disk and then streamed from a file that has no name any more."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO
from urllib.parse import quote

import structlog
from fastapi import APIRouter, HTTPException, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.dependencies import DatabaseDep, JobIdDep, LongWorkDep, SettingsDep
from api.forms import ResultsQuery
from api.longwork import Progress
from api.problems import responses
from api.schemas import JSONL, PARQUET
from api.scratch import PREFIX, scratch_dir
from db.session import Database
from jobs import store
from jobs.errors import BadInput, NotFound, Unavailable
from jobs.export import export_job
from jobs.service import job_detail
from jobs.settings import Settings

MEDIA_TYPES = {"parquet": PARQUET, "jsonl": JSONL}
_FORMAT_OF = {
    PARQUET: "parquet",
    "application/x-parquet": "parquet",
    JSONL: "jsonl",
    "application/jsonl": "jsonl",
    "application/x-jsonlines": "jsonl",
}
_WILDCARDS = ("*/*", "application/*")
CHUNK_BYTES = 256 << 10

log = structlog.get_logger()
router = APIRouter(prefix="/v1/jobs", tags=["results"], responses=responses(401, 403, 422, 429, 500, 503))


@router.get(
    "/{job_id}/results",
    operation_id="get_results",
    summary="Results as Parquet or JSONL",
    response_class=Response,
    responses={
        200: {
            "description": "The input columns untouched, the `forq_` columns beside them, in input order.",
            "content": {
                media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in MEDIA_TYPES.values()
            },
            "headers": {"Content-Disposition": {"schema": {"type": "string"}}},
        },
        **responses(404, 406),
    },
)
async def get_results(
    request: Request,
    settings: SettingsDep,
    database: DatabaseDep,
    long_work: LongWorkDep,
    job_id: JobIdDep,
    query: Annotated[ResultsQuery, Query()],
) -> Response:
    """Download what there is, also while the job runs: a row without an answer yet has nulls.

    The first byte comes when the export is whole, so set the client's read timeout to suit the job's size.
    """
    format = query.format or negotiate(request.headers.get("accept"))

    def export(progress: Progress) -> BinaryIO:
        return _export(database, settings, job_id, format, query, progress)

    file = await long_work.run(request, export)
    name = f"forq-{job_id}{'-failed' if query.failed else ''}.{format}"
    return OpenFileResponse(file, MEDIA_TYPES[format], name)


def negotiate(accept: str | None) -> str:
    """The format of an Accept header (RFC 9110, section 12.5.1); Parquet where it does not mind.

    Raises:
        HTTPException: 406, neither format is accepted.
    """
    if accept is None or not accept.strip():
        return "parquet"
    quality: dict[str, tuple[float, bool]] = {}
    for item in accept.split(","):
        media_type, _, parameters = item.strip().lower().partition(";")
        media_type = media_type.strip()
        named = _FORMAT_OF.get(media_type)
        for format in [named] if named else MEDIA_TYPES if media_type in _WILDCARDS else ():
            found = (_quality(parameters), named is not None)
            # A type that is named counts before a wildcard, whatever their order.
            if format not in quality or found[1] > quality[format][1]:
                quality[format] = found
    accepted = {format: value for format, (value, _) in quality.items() if value > 0}
    if not accepted:
        raise HTTPException(406, f"results come as {PARQUET} or {JSONL}: accept one of them, or say format=")
    return max(MEDIA_TYPES, key=lambda format: accepted.get(format, 0.0))


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def write_results(
    database: Database,
    settings: Settings,
    job_id: str,
    path: Path,
    format: str,
    query: ResultsQuery,
    progress: Progress,
) -> int:
    """Export to a file of this server; returns the number of rows.

    Raises:
        NotFound: the job's input is not on this machine.
        Unavailable: it cannot be written; why is in the log, not in the message.
    """
    job = job_detail(database, job_id)
    try:
        store.locate(settings, job.data_key)
    except NotFound:  # whose message names a folder of the server
        raise NotFound(
            f"the submitted file of job {job_id} is not on this machine: ask where it was submitted"
        ) from None
    try:
        exported = export_job(
            database, settings, job_id, path,
            format=format, failed_only=query.failed, with_trees=query.with_trees, with_logprobs=query.with_logprobs,
            progress=progress,
        )  # fmt: skip
    except (BadInput, Unavailable) as error:
        # The request is fine: the server's disk is full, or its copy of the input is damaged.
        # What is said of a damaged file may quote it.
        reason = str(error) if isinstance(error, Unavailable) else "the stored input cannot be read"
        log.error("export_failed", job=job_id, reason=reason)
        raise Unavailable("the results cannot be written on the server: its log says why") from None
    return exported.num_rows


def _export(
    database: Database, settings: Settings, job_id: str, format: str, query: ResultsQuery, progress: Progress
) -> BinaryIO:
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}results-", dir=scratch_dir(settings)) as scratch:
        path = Path(scratch) / f"results.{format}"
        write_results(database, settings, job_id, path, format, query, progress)
        return path.open("rb")
    # The folder is gone by now. The open file lives until it is closed, whatever becomes of client or process.


class OpenFileResponse(StreamingResponse):
    """Streams an open file and closes it, also when the client goes away half-way."""

    def __init__(self, file: BinaryIO, media_type: str, name: str) -> None:
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f"attachment; {_filename(name)}",
            "Cache-Control": "no-store",
        }
        super().__init__(_chunks(file), headers=headers, media_type=media_type)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


def _filename(name: str) -> str:
    if name.isascii() and '"' not in name and name.isprintable():
        return f'filename="{name}"'
    return f"filename*=UTF-8''{quote(name, safe='')}"  # RFC 6266, section 4.3


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
