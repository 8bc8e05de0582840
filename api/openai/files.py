"""Routes of files: upload, list, look at, delete, download."""

from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.access import CallerDep
from api.dependencies import DatabaseDep, LongWorkDep, SettingsDep
from api.forms import read_form
from api.openai.errors import OpenAiRoute, responses
from api.openai.schemas import DeletedFile, FileList, FileObject, FilesQuery, UploadForm, page, upload_body
from api.results import OpenFileResponse
from api.scratch import scratch_dir
from api.upload import receive_upload
from jobs import openai_files
from jobs.errors import BadInput

log = structlog.get_logger()
router = APIRouter(
    prefix="/v1/files",
    tags=["batches"],
    route_class=OpenAiRoute,
    responses=responses(400, 401, 403, 429, 500, 503),
)


@router.post(
    "",
    operation_id="create_file",
    summary="Upload a batch's input",
    response_model=FileObject,
    responses=responses(413, 415),
    openapi_extra={"requestBody": upload_body()},
)
async def create_file(
    request: Request, settings: SettingsDep, database: DatabaseDep, long_work: LongWorkDep, caller: CallerDep
) -> Any:
    """JSONL as OpenAI has it, or Parquet. What is in it is looked at when a batch is made of it."""
    folder, limit = scratch_dir(settings), settings.limits.max_upload_bytes
    async with receive_upload(request, folder, limit, check_name=lambda path: None) as upload:
        form = read_form(UploadForm, upload.fields)
        if (form.seconds is None) != (form.anchor is None):
            raise BadInput("expires_after has an anchor and seconds: give both or neither")
        path = upload.path
        if path is None:
            raise BadInput("the form has no file: send it as the part 'file', with a file name")
        created = await long_work.run(
            request,
            lambda progress: openai_files.create(
                database,
                settings,
                path,
                tenant=caller.tenant,
                purpose=form.purpose,
                expires_s=form.seconds,
            ),
        )
    log.info("file_uploaded", file=created["id"], num_bytes=created["bytes"], tenant=caller.tenant, key=caller.key_id)
    return created


@router.get("", operation_id="list_files", summary="List files", response_model=FileList)
def list_files(database: DatabaseDep, caller: CallerDep, query: Annotated[FilesQuery, Query()]) -> Any:
    found = openai_files.list_files(
        database,
        caller.only_tenant,
        after=query.after,
        limit=query.limit,
        is_newest_first=query.order == "desc",
        purpose=query.purpose,
    )
    return page(*found)


@router.get(
    "/{file_id}",
    operation_id="get_file",
    summary="A file's name, size and purpose",
    response_model=FileObject,
    responses=responses(404),
)
def get_file(database: DatabaseDep, caller: CallerDep, file_id: str) -> Any:
    return openai_files.view(openai_files.find(database, file_id, caller.only_tenant))


@router.delete(
    "/{file_id}",
    operation_id="delete_file",
    summary="Delete a file",
    response_model=DeletedFile,
    responses=responses(404),
)
def delete_file(database: DatabaseDep, caller: CallerDep, file_id: str) -> Any:
    """At once, also while a batch made of it runs: its job has a copy. The bytes go about an hour later."""
    openai_files.delete_file(database, file_id, caller.only_tenant)
    log.info("file_deleted", file=file_id, key=caller.key_id)
    return DeletedFile(id=file_id)


@router.get(
    "/{file_id}/content",
    operation_id="get_file_content",
    summary="Download a file",
    response_class=Response,
    responses={
        200: {
            "description": "The file as it is.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        **responses(404),
    },
)
async def get_file_content(settings: SettingsDep, database: DatabaseDep, caller: CallerDep, file_id: str) -> Response:
    row = await run_in_threadpool(openai_files.find, database, file_id, caller.only_tenant)
    path = openai_files.content_path(settings, row)
    file = await run_in_threadpool(path.open, "rb")
    return OpenFileResponse(file, "application/octet-stream", row.filename)
