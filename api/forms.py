"""The values a client may send: the submit form and the query strings. Other names are refused, not dropped."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from ulid import ULID

from api.schemas import JOB_ID
from db.states import JobState
from jobs.errors import NotFound
from jobs.forking import DECODINGS, VLLM_DECODINGS
from jobs.sampling import MAX_SEED
from jobs.service import MAX_LIST
from jobs.settings import Settings
from jobs.submit import MAX_NAME_CHARS, MAX_PRIORITY, SubmitOptions

MAX_WAIT_S = 60
REPEATED = ("turn",)
"""Fields that a form may give several times."""
JOB_ID_PATTERN = "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$"
"""For the document: a ULID, in the alphabet that leaves out what is easily misread."""
M = TypeVar("M", bound=BaseModel)
SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "seed", "n")


def parse_job_id(text: str) -> str:
    """A job's id in the form it is stored in; lower case is fine.

    Raises:
        ValueError: not a ULID.
    """
    shown = text if len(text) <= 40 else text[:37] + "..."
    try:
        job_id = str(ULID.from_str(text.upper()))
    except ValueError:
        job_id = ""
    # The parser forgives what the alphabet does not: what does not come back the same is another id.
    if not job_id or job_id != text.upper():
        raise ValueError(f"{shown!r} is not a job id: those have 26 letters and digits (a ULID)")
    return job_id


def job_id_or_not_found(job_id: str) -> str:
    """Raises NotFound: an id that no job can have is a job that does not exist."""
    try:
        return parse_job_id(job_id)
    except ValueError as error:
        raise NotFound(f"no such job: {error}") from None


def _told(description: str | None = None, **bounds: Any) -> Any:
    """A field that may be left out, with what the document says of its values."""
    return Field(None, description=description, json_schema_extra=bounds)


def read_form(model: type[M], fields: Mapping[str, Any]) -> M:
    """Raises RequestValidationError: as FastAPI would for a body it reads itself."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None


class StorableTexts(BaseModel):
    """Base of what brings texts that are stored: all of them, also keys and what is in a list, can be."""

    @field_validator("*", mode="before")
    @classmethod
    def _are_storable(cls, value: Any) -> Any:
        for text in _texts_in(value):
            # PostgreSQL refuses NUL in text; the others have no business in a column name or a template.
            if any(char < " " and char not in "\t\r\n" for char in text):
                raise ValueError("has control characters: remove them")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError("has half of a surrogate pair: write valid Unicode")
        return value


def _texts_in(value: Any) -> Iterator[str]:
    """Its own, or those of its parts: no field takes any that lie deeper."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return (part for part in parts if isinstance(part, str))


class SubmitForm(StorableTexts):
    """The form fields beside the file. A row's own `sampling` struct column overrides them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        None,
        description="Instead of the file: `s3://`, `gs://` or `file://`, under one of the service's storage roots.",
        examples=["s3://bucket/prompts.parquet"],
    )
    model: str | None = Field(None, description="A configured alias; without it the service's default.")
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = Field(None, description="A Jinja template over the columns, rendered in a sandbox.")
    system: str | None = Field(None, description="A Jinja template of a system message.")
    turn: list[str] = Field(
        [], description="Jinja templates of the later turns, one field each, in order: asked after the answer before."
    )
    id_column: str | None = None
    decoding: str = Field(
        "ar",
        description=(
            "`ar`, one token after the other, or `apar`: the model forks its answers. On models with the reference "
            f"backend also {', '.join(f'`{name}`' for name in DECODINGS if name not in VLLM_DECODINGS)}."
        ),
    )
    # The bounds are told here and kept by `jobs.submit`, whose messages name the remedy.
    max_tokens: int | None = _told(minimum=1)
    temperature: float | None = _told(minimum=0, maximum=2)
    top_p: float | None = _told(exclusiveMinimum=0, maximum=1)
    seed: int | None = _told(minimum=0, exclusiveMaximum=MAX_SEED)
    n: int | None = _told("Samples per row.", minimum=1)
    priority: int = Field(
        0,
        description="Higher comes first; waiting time counts too.",
        json_schema_extra={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    )
    kv_share: float | None = _told(
        "The part of the KV budget that the job may hold while other jobs wait.", exclusiveMinimum=0, maximum=1
    )
    name: str | None = Field(None, examples=["vicuna"], json_schema_extra={"minLength": 1, "maxLength": MAX_NAME_CHARS})
    webhook: str | None = Field(None, description="The URL of a webhook of yours that is to hear of this job.")

    def options(self, settings: Settings, tenant: str) -> SubmitOptions:
        return SubmitOptions(
            model=self.model if self.model is not None else settings.default_model,
            sampling=self.model_dump(include=set(SAMPLING_FIELDS), exclude_none=True),
            source="api",
            tenant=tenant,
            turn=tuple(self.turn),
            **self.model_dump(exclude={"url", "model", "turn", *SAMPLING_FIELDS}),
        )


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(50, ge=1, le=MAX_LIST)
    state: JobState | None = None
    before: Annotated[str, AfterValidator(parse_job_id)] | None = Field(
        None,
        description="Jobs older than this one: the last page's `next_before`.",
        examples=[JOB_ID],
        json_schema_extra={"pattern": JOB_ID_PATTERN},
    )


class StatusQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: float = Field(0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for news.")


class ResultsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["parquet", "jsonl"] | None = Field(None, description="Goes before the Accept header.")
    failed: bool = Field(False, description="Only rows that ended with an error.")
    with_trees: bool = Field(False, description="Add the column `forq_tree`.")
    with_logprobs: bool = Field(False, description="Add the column `forq_logprobs`, where the job asked for them.")


class ExportForm(ResultsQuery):
    url: str = Field(
        description="`s3://`, `gs://` or `file://`, under one of the service's storage roots.",
        examples=["s3://bucket/answers.parquet"],
    )
    format: Literal["parquet", "jsonl"] | None = Field(None, description="By default what the URL's suffix says.")
