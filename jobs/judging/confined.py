"""Prepares a judging with the limits of a submit, in a process of its own."""

from functools import partial
from pathlib import Path
from typing import Any

from jobs.confined import run_confined
from jobs.judging.options import JudgeOptions
from jobs.judging.preparing import Prepared, prepare, prepared_of
from jobs.settings import Limits
from jobs.source import Progress


def prepare_confined(path: Path, options: JudgeOptions, limits: Limits, scratch: Path, report: Progress) -> Prepared:
    """`preparing.prepare` in a child; errors as of `run_confined`."""
    return prepared_of(run_confined(partial(_prepare, path, options, scratch), path.name, limits, report))


def _prepare(path: Path, options: JudgeOptions, scratch: Path, report: Progress) -> dict[str, Any]:
    return prepare(path, options, scratch, report).said()
