"""What the API says, as pydantic models: the dicts of `jobs.service`, key by key, with their meanings for OpenAPI.

A test compares each with what the service really returns, so that no key is dropped on the way out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from db.states import JobState, RequestState

JOB_ID = "01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"
PARQUET, JSONL = "application/vnd.apache.parquet", "application/x-ndjson"
Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-01-31T09:30:00.123000Z"])]


class Counts(BaseModel):
    """Rows of a job; those neither completed, failed nor cancelled still wait or run."""

    total: int
    completed: int
    failed: int
    cancelled: int


class JobStatus(BaseModel):
    """A job as it stands."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "job_id": JOB_ID,
                    "name": "vicuna",
                    "state": "running",
                    "model": "smollm2-135m",
                    "decoding": "ar",
                    "counts": {"total": 80, "completed": 41, "failed": 1, "cancelled": 0},
                    "created_at": "2026-01-31T09:30:00.123000Z",
                    "started_at": "2026-01-31T09:30:01.456000Z",
                    "finished_at": None,
                    "eta_s": 23.4,
                    "output_tokens": 5120,
                    "error": None,
                }
            ]
        }
    )

    job_id: str
    name: str | None
    state: JobState
    model: str
    decoding: str
    counts: Counts
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    eta_s: float | None = Field(description="Seconds to the end at the pace so far; not part of the ETag.")
    output_tokens: int
    error: str | None = Field(description="Why the job failed, or why it stands still.")


class RetriedJob(JobStatus):
    """A job whose failed rows were queued again."""

    retried: int = Field(description="Rows queued again.")


class ExportedFile(BaseModel):
    """Results that were written to object storage."""

    job_id: str
    url: str
    format: Literal["parquet", "jsonl"]
    rows: int


class JobList(BaseModel):
    jobs: list[JobStatus]
    next_before: str | None = Field(description="`before` of the next page; null when there is none.")


class SampleStats(BaseModel):
    """A sample's memory receipt."""

    threads: int
    forks: int
    max_width: int = Field(description="The most threads that ran at once.")
    steps: int
    peak_cached_tokens: int
    peak_blocks: int
    attended_tokens: int
    sequential_peak_tokens: int
    sequential_attended_tokens: int
    preemptions: int
    forwards: int | None = Field(description="This and what follows: the decoder's own figures; null on vLLM.")
    hit_rate: float | None = Field(description="HR: steps that had a candidate tree, of all.")
    acceptance_length: float | None = Field(description="AL: tokens that such a step brought, on average.")
    decoding_efficiency: float | None = Field(description="DE: output tokens per forward.")
    draft_nodes: int | None = Field(description="Nodes computed to draft.")
    verify_nodes: int | None = Field(description="Nodes computed to be verified.")


class TreeNode(BaseModel):
    """A paragraph node; [start, end) are tokens of the restored output."""

    node: int
    parent: int | None
    kind: str
    thread: int
    start: int
    end: int
    first_step: int
    last_step: int
    text_start: int = Field(description="The same span in characters (Unicode code points) of the output.")
    text_end: int
    text: str = Field(description="Those characters; the texts of all nodes, in order, are the output.")


class Turn(BaseModel):
    """An answer before the last one of a row with several turns."""

    content: str
    finish_reason: str
    prompt_tokens: int = Field(description="The conversation up to its question, chat template included.")
    output_tokens: int


class Sample(BaseModel):
    sample: int
    output: str = Field(description="The answer; of several turns the last one, which all figures are about.")
    turns: list[Turn] = Field(description="The answers before it, in order; none of a row with one turn.")
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    stats: SampleStats | None
    tree: list[TreeNode]


class RequestDetail(BaseModel):
    """One input row and its answers."""

    job_id: str
    row: int
    id: str | None = Field(description="The value of the job's id column.")
    state: RequestState
    error_code: str | None
    error: str | None
    samples: list[Sample]


class JobStats(BaseModel):
    """The job's memory receipt: sums over its finished samples, each beside its sequential value."""

    job_id: str
    state: JobState
    decoding: str
    counts: Counts
    num_samples: int
    prompt_tokens: int
    cached_prompt_tokens: int = Field(description="Prompt tokens that the engine's prefix cache served.")
    prefix_cache_hit_rate: float | None = Field(
        description="`cached_prompt_tokens` of the prompt tokens; null where the engine does not say."
    )
    output_tokens: int
    max_width: int = Field(description="The most threads of one sample that ran at once.")
    max_threads: int = Field(description="The most threads of one sample.")
    forked_samples: int = Field(description="Samples that forked at least once.")
    threads: int
    forks: int
    steps: int
    peak_cached_tokens: int
    peak_blocks: int
    attended_tokens: int
    sequential_peak_tokens: int
    sequential_attended_tokens: int
    preemptions: int
    sequential_steps: int
    mean_threads: float | None = Field(description="Threads per sample.")
    forked_share: float | None = Field(description="Samples that forked, of all samples.")
    peak_ratio: float | None = Field(description="`peak_cached_tokens` of `sequential_peak_tokens`.")
    peak_saved_percent: float | None
    attended_ratio: float | None
    attended_saved_percent: float | None
    steps_ratio: float | None
    steps_saved_percent: float | None
    forwards: int | None = Field(description="Sum; this and what follows: the decoder's own figures, null on vLLM.")
    draft_nodes: int | None
    verify_nodes: int | None
    mean_hit_rate: float | None
    mean_acceptance_length: float | None
    mean_decoding_efficiency: float | None


class Model(BaseModel):
    """A configured alias, in the shape of OpenAI's model list. Where its files come from is the operator's business."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["forq"] = "forq"
    is_default: bool = Field(description="Used by a job that names no model.")
    max_model_len: int | None = Field(description="Tokens of prompt and answer together; null: the model's own.")
    default_max_tokens: int
    kv_budget: str | None = Field(examples=["1 GiB"])


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str


class Check(BaseModel):
    """Whether one part can be used, and why not."""

    name: Literal["database", "broker"]
    ok: bool
    detail: str


class Readiness(BaseModel):
    status: Literal["ready"] = "ready"
    checks: list[Check]


class RefusedValue(BaseModel):
    where: str = Field(examples=["query.limit"])
    message: str


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(examples=["about:blank"])
    title: str
    status: int
    detail: str
    errors: list[RefusedValue] | None = Field(None, description="Each refused value, where there are several.")
    checks: list[Check] | None = Field(None, description="From `/readyz` only.")


def with_file(fields: type[BaseModel]) -> dict[str, Any]:
    """An OpenAPI request body: a form's fields and the part `file`."""
    schema = fields.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "Parquet, or OpenAI batch JSONL, by its file name."}
    others = {name: _without_null(value) for name, value in schema["properties"].items()}
    schema["properties"] = {"file": file, **others}
    # Or url, as its text says; not oneOf, which tools that read documents get wrong.
    schema["required"] = ["file"]
    disposition = {"schema": {"type": "string"}, "example": 'form-data; name="file"; filename="prompts.parquet"'}
    encoding = {"contentType": f"{PARQUET}, {JSONL}", "headers": {"Content-Disposition": disposition}}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema, "encoding": {"file": encoding}}}}


def _without_null(value: dict[str, Any]) -> dict[str, Any]:
    """A form field's schema: a form has no null, only fields that are not in it."""
    kinds = [kind for kind in value.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return value
    rest = {key: part for key, part in value.items() if key not in ("anyOf", "default")}
    return {**kinds[0], **rest}
