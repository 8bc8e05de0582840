"""Sampling values: what a job's flags and a row's `sampling` struct may say, checked before any engine sees them."""

import math
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jobs.errors import BadInput

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SEED = 1 << 63


def _finite(value: float) -> float:
    # NaN passes every range check by comparing false, and reaches the engine as a dead sampler.
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {value}")
    return value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if isinstance(value, str | bytes):
        raise ValueError("must be a number, not text")
    return value


def _whole(value: Any) -> Any:
    # A column with nulls often arrives as float64: 128.0 is a whole number, 128.5 is not, and neither is NaN.
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"must be a whole number, not {value}")
    return _no_bool(value)


Number = Annotated[float, BeforeValidator(_no_bool), AfterValidator(_finite)]
Whole = Annotated[int, BeforeValidator(_whole)]


class Sampling(BaseModel):
    """One request's sampling values; None means "not said here", so that a row's values can lie over the job's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    seed: Annotated[Whole, Field(ge=0, lt=MAX_SEED)] | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    stop: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string_is_a_list(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("stop"), str):
            return {**values, "stop": [values["stop"]]}
        return values

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop is not None:
            if len(self.stop) > MAX_STOP_STRINGS:
                raise ValueError(f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}")
            for text in self.stop:
                if not 0 < len(text) <= MAX_STOP_CHARS:
                    raise ValueError(f"a stop string has {len(text)} characters: 1 to {MAX_STOP_CHARS} are allowed")
                if any("\ud800" <= character <= "\udfff" for character in text):
                    raise ValueError("a stop string holds half of a surrogate pair: write valid Unicode")
        return self

    def over(self, base: "Sampling") -> "Sampling":
        """These values where they are said, the base's elsewhere."""
        return base.model_copy(update=self.said())

    def said(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


def parse_sampling(values: dict[str, Any], *, max_n: int, max_max_tokens: int) -> Sampling:
    """Check raw values; nulls count as not said.

    Raises:
        BadInput: names each value that is refused, and its limit.
    """
    try:
        sampling = Sampling.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        raise BadInput("; ".join(_fault(fault) for fault in error.errors())) from None
    if sampling.n is not None and sampling.n > max_n:
        raise BadInput(f"n is {sampling.n}, the limit is {max_n}: ask for fewer samples or raise limits.max_n")
    if sampling.max_tokens is not None and sampling.max_tokens > max_max_tokens:
        raise BadInput(
            f"max_tokens is {sampling.max_tokens}, the limit is {max_max_tokens}: "
            "ask for fewer or raise limits.max_max_tokens"
        )
    return sampling


@lru_cache(maxsize=1)
def sampling_fields() -> frozenset[str]:
    return frozenset(Sampling.model_fields)


def _fault(fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"]) or "sampling"
    if fault["type"] == "extra_forbidden":
        return f"{name} is not a sampling value: use {', '.join(sorted(sampling_fields()))}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    value = repr(fault["input"])
    shown = value if len(value) <= 40 else value[:37] + "..."
    if name == "sampling" or message.startswith(("must ", "stop ", "a stop")):
        return f"{name}: {message}" if name != "sampling" else message
    return f"{name} is {shown}: it should be {message}"
