"""The export of a data set: every answer of a job through the steps, in one pass, into one file or two.

rows -> answers -> filters -> exact duplicates -> near duplicates -> train or test -> written
"""

import contextlib
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from db.session import Database
from jobs import store
from jobs.dataset.duplicates import ExactDuplicates, NearDuplicates
from jobs.dataset.filters import REASONS, Answer, Filters
from jobs.dataset.formats import as_cell, conversation_field
from jobs.dataset.options import DATASET_FORMATS, ExportOptions
from jobs.dataset.split import is_test
from jobs.errors import BadInput, Unavailable
from jobs.export import REQUEST_FIELD, TURNS_FIELD, format_of, iter_results, open_sink, take
from jobs.faults import shown_name, shown_names
from jobs.settings import Settings
from jobs.turns import conversation

Progress = Callable[[str, int, int], None]


@dataclass
class Counts:
    """What became of every answer; see `check`."""

    rows: int = 0
    """Of the input."""
    rows_failed: int = 0
    rows_cancelled: int = 0
    rows_waiting: int = 0
    """Not answered yet: the job is running."""
    answers: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """By reason: those of `jobs.dataset.filters`, `exact_duplicate` and `near_duplicate`."""
    train: int = 0
    test: int = 0

    @property
    def written(self) -> int:
        return self.train + self.test

    def check(self) -> None:
        """Every answer is either written or removed for one reason."""
        assert self.answers == self.written + self.removed.total(), self

    def as_dict(self) -> dict[str, Any]:
        reasons = (*REASONS, "exact_duplicate", "near_duplicate")
        return {
            "rows": self.rows,
            "rows_failed": self.rows_failed,
            "rows_cancelled": self.rows_cancelled,
            "rows_waiting": self.rows_waiting,
            "answers": self.answers,
            "removed": {reason: self.removed[reason] for reason in reasons},
            "train": self.train,
            "test": self.test,
            "written": self.written,
        }


@dataclass(frozen=True)
class DataSet:
    """What was written."""

    train: Path
    test: Path | None
    """None without a split."""
    counts: Counts


def export_dataset(
    database: Database,
    settings: Settings,
    job_id: str,
    target: Path,
    options: ExportOptions,
    progress: Progress | None = None,
) -> DataSet:
    """Write the answers that pass every step to `target`; with a split, the test side beside it.

    The files appear when both are whole. A target without a suffix is a folder: `train` and `test` go into it.

    Raises:
        NotFound: no such job, or its input is not on this machine.
        BadInput: an expression, a column or the target cannot be used.
        Unavailable: it cannot be written, or the disk is full.
    """
    train, test = targets_of(target, options)
    format = options.format or format_of(target)
    if train.parent == target:
        _make_folder(target)
    file_format = format if format in ("parquet", "jsonl") else format_of(train)
    steps = _Steps(options)
    batches = iter_results(database, settings, job_id, with_requests=True, progress=progress)
    writer = _Writer(next(batches).schema, format, options.column)
    temporaries = [store.temporary_beside(path) for path in (train, test) if path is not None]
    try:
        with contextlib.ExitStack() as stack:
            sinks = [open_sink(file_format, path, writer.schema) for path in temporaries]
            for sink in sinks:
                stack.enter_context(sink)
            for batch in batches:
                for sink, kept in zip(sinks, steps.sort(batch), strict=False):
                    if kept.indices:
                        sink.write(writer.batch(batch, kept))
        for temporary, path in zip(temporaries, filter(None, (train, test)), strict=True):
            store.publish(temporary, path)
    except OSError as error:
        raise Unavailable(f"{target}: cannot be written ({error.strerror or error}): check space and rights") from None
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
    steps.counts.check()
    return DataSet(train, test, steps.counts)


def check_columns(database: Database, settings: Settings, job_id: str, options: ExportOptions) -> None:
    """Raises BadInput: the job's results have no such column to keep."""
    batches = iter_results(database, settings, job_id, with_requests=True)
    _Writer(next(batches).schema, options.format or "parquet", options.column)


def targets_of(target: Path, options: ExportOptions) -> tuple[Path, Path | None]:
    """The files of the train and of the test side.

    Raises:
        BadInput: they cannot be there, or files of another export lie beside them and would be taken for its halves.
    """
    format = options.format or format_of(target)
    has_test = options.test_share is not None
    if target.suffix and not target.is_dir():
        if not target.parent.is_dir():
            raise BadInput(f"{target}: not a file in a folder that exists")
        test = target.with_name(f"{target.stem}.test{target.suffix}")
        if not has_test and test.exists():
            raise BadInput(f"{test.name} lies beside {target.name}, the test side of another split: remove it first")
        return target, test if has_test else None
    if not has_test:
        raise BadInput(f"{target}: name a file (.parquet, .jsonl); a folder is for a split, with --test-share")
    if not target.parent.is_dir():
        raise BadInput(f"{target}: not in a folder that exists")
    suffix, other = ("jsonl", "parquet") if format == "jsonl" else ("parquet", "jsonl")
    old = [path.name for path in (target / f"train.{other}", target / f"test.{other}") if path.exists()]
    if old:  # who loads the folder would get these
        raise BadInput(f"{target} has {' and '.join(old)} of an export in another format: remove them first")
    return target / f"train.{suffix}", target / f"test.{suffix}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be made a folder ({error.strerror}): name another") from None


@dataclass
class _Kept:
    """The rows of a batch that go to one side, and their conversations."""

    indices: list[int] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] = field(default_factory=list)


class _Steps:
    """Every answer's way, and the counts."""

    def __init__(self, options: ExportOptions) -> None:
        self.counts = Counts()
        self._options = options
        self._filters = Filters(options)
        self._exact = ExactDuplicates() if options.dedup is not None else None
        near = options.dedup == "near"
        self._near = NearDuplicates(options.near_threshold, options.near_shingles) if near else None

    def sort(self, batch: pa.RecordBatch) -> tuple[_Kept, _Kept]:
        """The rows of a batch that are kept, for train and for test."""
        train, test = _Kept(), _Kept()
        for index, row in enumerate(_samples(batch)):
            self._count(row)
            if row["forq_output"] is None:
                continue
            messages = _conversation(row)
            reason = self._reason(row, messages)
            if reason is not None:
                self.counts.removed[reason] += 1
                continue
            share = self._options.test_share
            to_test = share is not None and is_test(messages, share)
            self.counts.test += to_test
            self.counts.train += not to_test
            side = test if to_test else train
            side.indices.append(index)
            side.conversations.append(messages)
        return train, test

    def _count(self, row: dict[str, Any]) -> None:
        counts = self.counts
        if row["forq_output"] is not None:
            counts.answers += 1
            counts.rows += row["forq_sample"] == 0
            return
        counts.rows += 1
        if row["forq_error_code"] is None:
            counts.rows_waiting += 1
        elif row["forq_error_code"] == "cancelled":
            counts.rows_cancelled += 1
        else:
            counts.rows_failed += 1

    def _reason(self, row: dict[str, Any], messages: list[dict[str, str]]) -> str | None:
        turns = row.get(TURNS_FIELD.name) or []
        reasons = (*(turn["finish_reason"] for turn in turns), row["forq_finish_reason"])
        reason = self._filters.reason(Answer(row["forq_output"], row["forq_output_tokens"], reasons))
        if reason is not None or self._exact is None:
            return reason
        text = row["forq_output"]
        if self._options.dedup_on == "conversation":
            text = "\n".join(message["content"] for message in messages)
        if not self._exact.is_new(text):
            return "exact_duplicate"
        if self._near is not None and not self._near.is_new(text):
            return "near_duplicate"
        return None


_READ = (
    "forq_output", "forq_finish_reason", "forq_error_code", "forq_sample", "forq_output_tokens", TURNS_FIELD.name,
    REQUEST_FIELD.name,
)  # fmt: skip


def _samples(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    columns = {name: batch.column(name).to_pylist() for name in _READ if name in batch.schema.names}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _conversation(row: dict[str, Any]) -> list[dict[str, str]]:
    earlier = [turn["content"] for turn in row.get(TURNS_FIELD.name) or []]
    return conversation(json.loads(row[REQUEST_FIELD.name]), [*earlier, row["forq_output"]])


class _Writer:
    """Makes the batches of the file of the rows that are kept."""

    def __init__(self, source: pa.Schema, format: str, columns: list[str]) -> None:
        self._format = format
        self._own = conversation_field(format) if format in DATASET_FORMATS else None
        known = [name for name in source.names if name != REQUEST_FIELD.name]
        for name in columns:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise BadInput(
                    f"there is no column '{shown_name([name])}' to keep{hint} There are: {shown_names(known)}"
                )
            if self._own is not None and name == self._own.name:
                raise BadInput(f"column {name!r} has the name of the conversation's own: leave it out")
        self._columns = list(dict.fromkeys(columns)) or ([] if self._own is not None else known)
        fields = [source.field(name) for name in self._columns]
        self.schema = pa.schema([*([self._own] if self._own is not None else []), *fields])

    def batch(self, source: pa.RecordBatch, kept: _Kept) -> pa.RecordBatch:
        columns = [take(source.column(name), kept.indices) for name in self._columns]
        if self._own is not None:
            cells = [as_cell(self._format, messages) for messages in kept.conversations]
            columns.insert(0, pa.array(cells, self._own.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
