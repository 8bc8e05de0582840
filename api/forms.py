"""The values a client may send: the submit form and the query strings. Other names are refused, not dropped."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from ulid import ULID

from api.schemas import JOB_ID
from db.states import JobState
from jobs.errors import NotFound
from jobs.forking import DECODINGS, VLLM_DECODINGS
from jobs.service import MAX_LIST
from jobs.settings import Settings
from jobs.submit import SubmitOptions

MAX_WAIT_S = 60
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "n")


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
    if job_id != text.upper():
        raise ValueError(f"{shown!r} is not a job id: those have 26 letters and digits (a ULID)")
    return job_id


def job_id_or_not_found(job_id: str) -> str:
    """Raises NotFound: an id that no job can have is a job that does not exist."""
    try:
        return parse_job_id(job_id)
    except ValueError as error:
        raise NotFound(f"no such job: {error}") from None


class SubmitForm(BaseModel):
    """The form fields beside the file. A row's own `sampling` struct column overrides them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="A configured alias; without it the service's default.")
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = Field(None, description="A Jinja template over the columns, rendered in a sandbox.")
    id_column: str | None = None
    decoding: str = Field(
        "ar",
        description=(
            "`ar`, one token after the other, or `apar`: the model forks its answers. On models with the reference "
            f"backend also {', '.join(f'`{name}`' for name in DECODINGS if name not in VLLM_DECODINGS)}."
        ),
    )
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, description="Samples per row.")
    priority: int = Field(0, description="Higher comes first; waiting time counts too.")
    kv_share: float | None = Field(
        None, description="Above 0, at most 1: the part of the KV budget that the job may hold while other jobs wait."
    )
    name: str | None = Field(None, examples=["vicuna"])

    @field_validator("*", mode="before")
    @classmethod
    def _no_control_characters(cls, value: Any) -> Any:
        # PostgreSQL refuses NUL in text; the others have no business in a column name or a template.
        if isinstance(value, str) and any(char < " " and char not in "\t\r\n" for char in value):
            raise ValueError("has control characters: remove them")
        return value

    def options(self, settings: Settings, tenant: str) -> SubmitOptions:
        return SubmitOptions(
            model=self.model if self.model is not None else settings.default_model,
            sampling=self.model_dump(include=set(_SAMPLING), exclude_none=True),
            source="api",
            tenant=tenant,
            **self.model_dump(exclude={"model", *_SAMPLING}),
        )


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(50, ge=1, le=MAX_LIST)
    state: JobState | None = None
    before: Annotated[str, AfterValidator(parse_job_id)] | None = Field(
        None, description="Jobs older than this one: the last page's `next_before`.", examples=[JOB_ID]
    )


class StatusQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: float = Field(0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for news.")


class ResultsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["parquet", "jsonl"] | None = Field(None, description="Goes before the Accept header.")
    failed: bool = Field(False, description="Only rows that ended with an error.")
    with_trees: bool = Field(False, description="Add the column `forq_tree`.")
