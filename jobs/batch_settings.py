"""The settings of the OpenAI-compatible batches."""

from pydantic import BaseModel, ConfigDict, Field


class BatchSettings(BaseModel):
    """One entry of the configuration, `[batches]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_lines: int = Field(default=50_000, ge=1)
    """Of a batch's JSONL file; Parquet has `limits.max_rows` alone."""
    max_file_bytes: int = Field(default=200_000_000, ge=1)
    """Of a batch's JSONL file; uploads as such have `limits.max_upload_bytes`."""
    poll_s: float = Field(default=1.0, gt=0)
    """How often an API process looks for batches that can go on."""
    claim_s: float = Field(default=30.0, ge=1)
    """After so long without a sign of the API process that checks or writes a batch, another one may."""
    repeat_s: float = Field(default=120.0, ge=0)
    """The same creation again within this time is taken for a client's retry, and answered with the first batch."""
