"""What is sent and received, key by key as OpenAI's; docs/openai-batches.md says what is ours."""

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.forms import SAMPLING_FIELDS, StorableTexts
from db.states import BatchState
from jobs import batches, openai_files
from jobs.batches import NewBatch
from jobs.openai_files import MAX_EXPIRY_S, MIN_EXPIRY_S

FILE_ID = "file-01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"
BATCH_ID = "batch_01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"
_FOR_THE_JOB = ("decoding", "priority", "kv_share", "prompt_column", "messages_column", "template", "id_column")
_ULID = "[0-9A-HJKMNP-TV-Z]{26}"


def _check_id(prefix: str, text: str) -> str:
    if not re.fullmatch(re.escape(prefix) + _ULID, text):
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise ValueError(f"{shown!r} is no id: those begin with {prefix}")
    return text


def _id_field(prefix: str, example: str) -> Any:
    return Field(examples=[example], json_schema_extra={"pattern": f"^{prefix}{_ULID}$"})


FileId = Annotated[
    str, AfterValidator(partial(_check_id, openai_files.PREFIX)), _id_field(openai_files.PREFIX, FILE_ID)
]
BatchId = Annotated[str, AfterValidator(partial(_check_id, batches.PREFIX)), _id_field(batches.PREFIX, BATCH_ID)]
"""As a client sends them; both may be of a file or batch that is not there."""


class Page(BaseModel):
    """A list as OpenAI's clients page through it: they ask on with `after`, the last object's id."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": has_more}


class FileObject(BaseModel):
    id: str = Field(examples=[FILE_ID])
    object: Literal["file"]
    bytes: int
    created_at: int = Field(description="Seconds since 1970, as all times here.")
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None
    expires_at: int | None


class FileList(Page):
    data: list[FileObject]


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class LineError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(BaseModel):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int = Field(description="When the batch has ended: the lines of its error file.")


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ForqBatch(BaseModel):
    job_id: str | None = Field(description="The batch's job, for /v1/jobs; null before the input is checked.")


class BatchObject(BaseModel):
    id: str = Field(examples=[BATCH_ID])
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: Usage | None = Field(description="When the batch has ended.")
    metadata: dict[str, str] | None
    forq: ForqBatch


class BatchList(Page):
    data: list[BatchObject]


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int


class UploadForm(StorableTexts):
    """The form fields beside the file."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, alias="expires_after[seconds]")


def upload_body() -> dict[str, Any]:
    """The OpenAPI request body of an upload."""
    file = {"type": "string", "format": "binary", "description": "JSONL as OpenAI has it, or Parquet."}
    text, number = {"type": "string", "enum": ["created_at"]}, {"type": "integer", "minimum": MIN_EXPIRY_S}
    schema = {
        "type": "object",
        "properties": {
            "file": file,
            "purpose": {"type": "string", "enum": ["batch"]},
            "expires_after[anchor]": text,
            "expires_after[seconds]": {**number, "maximum": MAX_EXPIRY_S},
        },
        "dependentRequired": {
            "expires_after[anchor]": ["expires_after[seconds]"],
            "expires_after[seconds]": ["expires_after[anchor]"],
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


class CreateBatch(StorableTexts):
    """OpenAI's fields, then ours, which its clients send as `extra_body`."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: FileId
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str = Field(description="Minutes, hours or days: 30m, 24h, 7d.", examples=["24h"])
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    model: str | None = Field(None, description="For all rows; without it the lines say it.")
    decoding: str | None = Field(None, description="`apar`: the model forks its answers. Lines may say it, too.")
    priority: int | None = None
    kv_share: float | None = Field(None, allow_inf_nan=False)
    prompt_column: str | None = Field(None, description="Of Parquet, as all that follows but the sampling values.")
    messages_column: str | None = None
    template: str | None = None
    id_column: str | None = Field(None, description="Its values are the `custom_id`s.")
    max_tokens: int | None = Field(None, description="This and what follows: for rows that do not say it.")
    temperature: float | None = Field(None, allow_inf_nan=False)
    top_p: float | None = Field(None, allow_inf_nan=False)
    seed: int | None = None
    n: int | None = None

    def asked(self) -> NewBatch:
        options = self.model_dump(include=set(_FOR_THE_JOB), exclude_none=True)
        sampling = self.model_dump(include=set(SAMPLING_FIELDS), exclude_none=True)
        if sampling:
            options["sampling"] = sampling
        expires = self.output_expires_after
        return NewBatch(
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            completion_window=self.completion_window,
            labels=self.metadata,
            output_expires_s=None if expires is None else expires.seconds,
            model=self.model,
            options=options,
        )


def create_body() -> dict[str, Any]:
    """The OpenAPI request body of a creation."""
    schema = CreateBatch.model_json_schema()
    expires = schema.pop("$defs")["ExpiresAfter"]
    schema["properties"]["output_expires_after"]["anyOf"][0] = expires
    return {"required": True, "content": {"application/json": {"schema": schema}}}


class FilesQuery(StorableTexts):
    model_config = ConfigDict(extra="forbid")

    after: FileId | None = Field(None, description="The last page's `last_id`.")
    limit: int = Field(openai_files.MAX_LIST, ge=1, le=openai_files.MAX_LIST)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = Field(
        None,
        description="`batch` or `batch_output`; there is none of any other.",
        json_schema_extra={"pattern": r"^[^\x00-\x08\x0b\x0c\x0e-\x1f]*$"},
    )


class BatchesQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: BatchId | None = Field(None, description="The last page's `last_id`.")
    limit: int = Field(20, ge=1, le=batches.MAX_LIST)
