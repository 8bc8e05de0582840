"""Reads `<name>.job.toml`, which lies beside a dropped file and says how to submit it."""

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.drop.files import JOB_SUFFIX, opened
from jobs.errors import BadInput
from jobs.faults import should_be, shown_name, shown_value, unknown_key
from jobs.flags import keys_for_flags
from jobs.settings import Settings
from jobs.source import first_line
from jobs.submit import SubmitOptions

MAX_JOB_BYTES = 4 << 20
"""Enough for the largest template, written in four-byte characters."""
_SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "seed", "n")


class JobFile(BaseModel):
    """The keys of a `job.toml`: those of `forq submit`, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    """The template's text, not a path."""
    system: str | None = None
    """The text of the system message's template."""
    turn: list[str] | None = None
    """The texts of the later turns' templates."""
    id_column: str | None = None
    decoding: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    priority: int | None = None
    kv_share: float | None = None
    name: str | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Any sampling value, also those without a key of their own."""


def names_for(data_name: str) -> tuple[str, str]:
    """The two names a data file's `job.toml` may have, the one that wins first."""
    return data_name + JOB_SUFFIX, PurePath(data_name).stem + JOB_SUFFIX


def job_files_of(data_names: Iterable[str], names: set[str]) -> dict[str, str]:
    """The job.toml of each data file that has one; files of the same stem may share theirs."""
    found = {}
    for data_name in data_names:
        toml = next((name for name in names_for(data_name) if name in names), None)
        if toml is not None:
            found[data_name] = toml
    return found


def read_options(path: Path | None, settings: Settings) -> SubmitOptions:
    """The options to submit a dropped file with; without a `job.toml` the defaults.

    Raises:
        BadInput: one line that names the file, the key and what it may be.
    """
    job = JobFile() if path is None else _read(path)
    said = {key: value for key, value in job.model_dump(exclude={"sampling"}).items() if value is not None}
    sampling = dict(job.sampling)
    for key in _SAMPLING_KEYS:
        if key in said and key in sampling:
            assert path is not None
            raise BadInput(f"{path.name}: {key} is given twice, at the top and in [sampling]: give it once")
        if key in said:
            sampling[key] = said.pop(key)
    if "turn" in said:
        said["turn"] = tuple(said["turn"])
    said.setdefault("model", settings.default_model)
    return SubmitOptions(**said, sampling=sampling, source="drop", dedupe=True)


def in_words_of_the_job_file(message: str, data_name: str) -> str:
    """What submit says of its flags, said of the keys."""
    text = keys_for_flags(message, JobFile.model_fields)
    return message if text == message else f"{text} (in {names_for(data_name)[1]})"


def _read(path: Path) -> JobFile:
    try:
        with opened(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read(MAX_JOB_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read ({error.strerror}): make it a readable file") from error
    if len(content) > MAX_JOB_BYTES:
        raise BadInput(f"{path.name} has over {MAX_JOB_BYTES} bytes: shorten it")
    try:
        return JobFile.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        raise BadInput(f"{path.name}: {'; '.join(_fault(fault) for fault in error.errors())}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise BadInput(f"{path.name} is not TOML ({first_line(error)}): correct it") from None


def _fault(fault: Any) -> str:
    key = shown_name(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return unknown_key(key, list(JobFile.model_fields))
    return f"{key} is {shown_value(fault['input'])}: it should be {should_be(fault)}"
