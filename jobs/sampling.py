"""Sampling values: what a job's flags and a row's `sampling` struct may say, checked before any engine sees them."""

import json
import math
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jobs.errors import BadInput
from jobs.faults import should_be, shown_name, shown_value

NOT_SERVED = frozenset(
    ("tools", "tool_choice", "functions", "function_call", "logit_bias", "reasoning_effort", "modalities", "audio",
     "prediction", "web_search_options")
)  # fmt: skip
"""What OpenAI's bodies may hold and this service does not do."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SEED = 1 << 63
MAX_LOGPROBS = 20
"""Likeliest tokens told for each token of an answer; vLLM's own limit."""
MAX_CHOICES, MAX_CHOICE_CHARS = 256, 16_384
"""The characters are those of all choices together."""
MAX_REGEX_CHARS = 4096
MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH = 65_536, 32
"""Of a schema as JSON text. A small text can still be a huge grammar: the worker compiles each under limits."""


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


class Structured(BaseModel):
    """What an answer must look like: exactly one of the three is said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choice: list[str] | None = None
    """The answer is one of these texts."""
    regex: str | None = None
    """The whole answer matches it."""
    json_schema: dict[str, Any] | None = None
    """The answer is JSON of this schema; JSON text of the schema is read, too."""

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_not_said(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        said = {name: value for name, value in values.items() if value is not None}
        if isinstance(said.get("json_schema"), str):
            try:
                said["json_schema"] = json.loads(said["json_schema"])
            except (ValueError, RecursionError):
                raise ValueError("structured.json_schema is not valid JSON: write the schema as an object") from None
        return said

    @model_validator(mode="after")
    def _check(self) -> Self:
        said = [name for name in ("choice", "regex", "json_schema") if getattr(self, name) is not None]
        if len(said) != 1:
            raise ValueError(
                f"structured says {' and '.join(said) or 'nothing'}: say one of choice, regex, json_schema"
            )
        texts = [self.regex] if self.regex is not None else self.choice
        if self.choice is not None:
            _check_choices(self.choice)
        elif self.regex is not None:
            if not 0 < len(self.regex) <= MAX_REGEX_CHARS:
                raise ValueError(
                    f"structured.regex has {len(self.regex)} characters: 1 to {MAX_REGEX_CHARS} are allowed"
                )
        else:
            texts = [_schema_text(self.json_schema)]
        if any("\ud800" <= character <= "\udfff" or character == "\0" for text in texts or () for character in text):
            raise ValueError("structured holds a NUL or half of a surrogate pair: write valid Unicode without them")
        return self


def _check_choices(choices: list[str]) -> None:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"structured.choice has {len(choices)} texts: 1 to {MAX_CHOICES} are allowed")
    if any(not choice for choice in choices):
        raise ValueError("structured.choice has an empty text: leave it out")
    num_chars = sum(map(len, choices))
    if num_chars > MAX_CHOICE_CHARS:
        raise ValueError(f"structured.choice has {num_chars} characters, the limit is {MAX_CHOICE_CHARS}")


def _schema_text(schema: Any) -> str:
    level, depth = [schema], 0
    while level:  # not by recursion, which a deep schema would exhaust
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"structured.json_schema is nested deeper than {MAX_SCHEMA_DEPTH} levels: flatten it")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):
        raise ValueError("structured.json_schema holds what JSON has no value for: write plain JSON") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(f"structured.json_schema has {len(text)} characters of JSON, the limit is {MAX_SCHEMA_CHARS}")
    return text


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
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of the answer's tokens, and of so many likeliest ones at each place."""
    structured: Structured | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string_is_a_list(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("stop"), str):
            return {**values, "stop": [values["stop"]]}
        return values

    @model_validator(mode="before")
    @classmethod
    def _a_struct_of_nulls_says_nothing(cls, values: Any) -> Any:
        # What a row of a Parquet file says that has no `structured` where other rows have one.
        structured = values.get("structured") if isinstance(values, dict) else None
        if isinstance(structured, dict) and structured and all(value is None for value in structured.values()):
            return {name: value for name, value in values.items() if name != "structured"}
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
        return base.model_copy(update={name: value for name, value in self if value is not None})

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
    name = shown_name(fault["loc"]) or "sampling"
    if fault["type"] == "extra_forbidden":
        if name in NOT_SERVED:
            return f"{name} is not served here: leave it out"
        known = Structured.model_fields if fault["loc"][0] == "structured" else sampling_fields()
        return f"{name} is not a sampling value: use {', '.join(sorted(known))}"
    message = should_be(fault)
    if name == "sampling" or message.startswith(("must ", "stop ", "a stop", "structured")):
        return message if name == "sampling" or message.startswith("structured") else f"{name}: {message}"
    return f"{name} is {shown_value(fault['input'])}: it should be {message}"
