"""What an export may be told to keep, and how to write it: the flags of `forq export`, and a recipe's `[export]`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jobs.dataset.duplicates import LEAST_THRESHOLD

DATASET_FORMATS = ("messages", "sharegpt")
"""Formats with a column of conversations instead of the input's and the results' columns."""


def _one_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_one_is_a_list)]


class ExportOptions(BaseModel):
    """How a job's answers become a file. Without any of these all rows are written as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    out: str | None = None
    format: Literal["messages", "sharegpt", "parquet", "jsonl", "openai"] | None = None
    """None: by the suffix of `out`."""
    column: Texts = []
    """Columns to keep beside the conversation; of `parquet` and `jsonl` the only ones."""
    finish_reason: Texts = []
    """An answer must have ended so, in every turn."""
    min_chars: Annotated[int, Field(ge=0)] | None = None
    max_chars: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    match: Texts = []
    """Regular expressions that must each be found in the answer."""
    no_match: Texts = []
    """Regular expressions of which none may be found."""
    dedup: Literal["exact", "near"] | None = None
    dedup_on: Literal["answer", "conversation"] = "answer"
    near_threshold: Annotated[float, Field(ge=LEAST_THRESHOLD, le=1)] = 0.8
    near_shingles: Literal["words", "chars"] = "words"
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        for what in ("chars", "tokens"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{what} is {least} and max_{what} {most}: no answer is so; swap them")
        if self.format == "openai" and not self.is_plain:
            raise ValueError("the format openai is not for a data set: use messages or sharegpt, or no other option")
        return self

    @property
    def is_plain(self) -> bool:
        """Whether all rows are to be written as they are, those without an answer too."""
        said = self.model_dump(exclude_defaults=True, exclude={"out", "format"})
        return self.format not in DATASET_FORMATS and not said
