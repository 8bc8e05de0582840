"""Export: the input columns untouched, plus the result columns, in input order, in bounded memory.

The stored file is read batch by batch, and beside each batch the database is asked for exactly its rows (keyset pages):
no cursor stays open, so an export may take long, run while the job runs, and never sees a row twice.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, case, func, select

from db.models import Output, Request, RequestStats, ThreadNode
from db.session import Database
from db.states import RequestState
from jobs import store
from jobs.batch_lines import write_lines
from jobs.errors import BadInput, Unavailable
from jobs.service import job_detail
from jobs.settings import Settings
from jobs.source import JSONL_SUFFIXES, PARQUET_SUFFIXES, iter_batches, open_parquet

TREE_TYPE = pa.list_(
    pa.struct(
        [
            ("node", pa.int32()),
            ("parent", pa.int32()),
            ("kind", pa.string()),
            ("thread", pa.int32()),
            ("start", pa.int32()),
            ("end", pa.int32()),
            ("first_step", pa.int32()),
            ("last_step", pa.int32()),
        ]
    )
)
RESULT_FIELDS: list[pa.Field] = [
    pa.field("forq_output", pa.string()),
    pa.field("forq_finish_reason", pa.string()),
    pa.field("forq_error_code", pa.string()),
    pa.field("forq_error", pa.string()),
    pa.field("forq_sample", pa.int32()),
    pa.field("forq_prompt_tokens", pa.int32()),
    pa.field("forq_output_tokens", pa.int32()),
    pa.field("forq_threads", pa.int32()),
    pa.field("forq_forks", pa.int32()),
    pa.field("forq_max_width", pa.int32()),
    pa.field("forq_steps", pa.int32()),
    pa.field("forq_peak_cached_tokens", pa.int32()),
    pa.field("forq_peak_blocks", pa.int32()),
    pa.field("forq_attended_tokens", pa.int64()),
    pa.field("forq_sequential_peak_tokens", pa.int32()),
    pa.field("forq_sequential_attended_tokens", pa.int64()),
    pa.field("forq_preemptions", pa.int32()),
    pa.field("forq_forwards", pa.int32()),
    pa.field("forq_hit_rate", pa.float64()),
    pa.field("forq_acceptance_length", pa.float64()),
    pa.field("forq_decoding_efficiency", pa.float64()),
    pa.field("forq_draft_nodes", pa.int32()),
    pa.field("forq_verify_nodes", pa.int32()),
    pa.field("forq_cached_tokens", pa.int32()),
]
_OF_OUTPUT = {"forq_prompt_tokens", "forq_output_tokens", "forq_sample", "forq_finish_reason", "forq_cached_tokens"}
"""Columns that the outputs' table has under the same name."""
_OF_REQUEST = {"forq_output", "forq_error_code", "forq_error"}
"""Columns that are put together."""
_TOKEN = [("token", pa.string()), ("logprob", pa.float64())]
LOGPROBS_FIELD = pa.field("forq_logprobs", pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))])))
TREE_FIELD = pa.field("forq_tree", TREE_TYPE)
_TURN = [("content", pa.string()), ("finish_reason", pa.string()), ("prompt_tokens", pa.int32())]
TURNS_FIELD = pa.field("forq_turns", pa.list_(pa.struct([*_TURN, ("output_tokens", pa.int32())])))
"""Only of jobs whose rows have several turns."""
REQUEST_FIELD = pa.field("forq_request", pa.string())
"""What was asked, as JSON text (`requests.payload`): for those who write conversations, never exported itself."""
_STORED_AS_JSON = {TURNS_FIELD.name: Output.turns, LOGPROBS_FIELD.name: Output.logprobs}
CANCELLED_TEXT = "the job was cancelled before this row was answered"
ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True)
class Exported:
    path: Path
    num_rows: int


def format_of(target: Path) -> str:
    """Raises BadInput: the file's suffix names no format."""
    suffix = target.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    known = ", ".join(PARQUET_SUFFIXES + JSONL_SUFFIXES)
    raise BadInput(f"{target.name}: the suffix is {target.suffix!r}; use {known}, or say --format parquet or jsonl")


def export_job(
    database: Database,
    settings: Settings,
    job_id: str,
    target: Path,
    *,
    format: str = "parquet",
    failed_only: bool = False,
    with_trees: bool = False,
    with_logprobs: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Exported:
    """Write a job's rows and results to `target`, which appears only when it is whole.

    A row with several samples becomes as many output rows; a row without an answer keeps one, with null results. The
    format `openai` is of lines instead: see jobs/batch_lines.py.

    Raises:
        NotFound: no such job, or its input is not on this machine.
        BadInput: the target's folder does not exist.
        Unavailable: it cannot be written, or the disk is full.
    """
    if format not in ("parquet", "jsonl", "openai"):
        raise BadInput(f"format is {format!r}: use parquet or jsonl, or openai")
    if target.is_dir() or not target.parent.is_dir():
        raise BadInput(f"{target}: not a file in a folder that exists")
    temporary = store.temporary_beside(target)
    num_rows = 0
    try:
        if format == "openai":
            num_rows = write_lines(database, job_id, temporary, failed_only=failed_only, progress=progress)
            store.publish(temporary, target)
            return Exported(target, num_rows)
        batches = iter_results(
            database,
            settings,
            job_id,
            failed_only=failed_only,
            with_trees=with_trees,
            with_logprobs=with_logprobs,
            progress=progress,
        )
        schema = next(batches).schema  # the first one is always there, and empty
        with open_sink(format, temporary, schema) as sink:
            for batch in batches:
                sink.write(batch)
                num_rows += batch.num_rows
        store.publish(temporary, target)
    except OSError as error:
        raise Unavailable(f"{target}: cannot be written ({error.strerror or error}): check space and rights") from None
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(target, num_rows)


def iter_results(
    database: Database,
    settings: Settings,
    job_id: str,
    *,
    failed_only: bool = False,
    with_trees: bool = False,
    with_logprobs: bool = False,
    with_requests: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the result batches in input order; the first one is empty and carries the schema.

    `with_requests` adds `REQUEST_FIELD`.
    """
    job = job_detail(database, job_id)
    path = store.locate(settings, job.data_key)
    asked = {
        TURNS_FIELD: bool(job.mapping.get("turn")),
        LOGPROBS_FIELD: with_logprobs,
        TREE_FIELD: with_trees,
        REQUEST_FIELD: with_requests,
    }
    fields = [*RESULT_FIELDS, *(field for field, is_asked in asked.items() if is_asked)]
    with open_parquet(path, None) as file:
        source_schema = file.schema_arrow
        schema = pa.schema([*source_schema, *fields], metadata=source_schema.metadata)
        yield pa.RecordBatch.from_pylist([], schema=schema)
        start = 0
        for batch in iter_batches(file, None, path.name):
            with database.read() as connection:
                indices, columns = _results(connection, job_id, start, batch.num_rows, failed_only, fields)
            start += batch.num_rows
            if indices:
                same = indices == list(range(batch.num_rows))
                inputs = batch.columns if same else [take(column, indices) for column in batch.columns]
                results = [pa.array(columns[field.name], type=field.type) for field in fields]
                yield pa.RecordBatch.from_arrays([*inputs, *results], schema=schema)
            if progress is not None:
                progress("exporting", start, job.num_rows)


def take(column: pa.Array, indices: list[int]) -> pa.Array:
    """The column's values at these places."""
    try:
        return column.take(pa.array(indices))
    except pa.ArrowNotImplementedError:  # some types (string_view) have no kernel for it
        return pa.concat_arrays([column.slice(index, 1) for index in indices])


def _results(
    connection: Connection,
    job_id: str,
    start: int,
    num_rows: int,
    failed_only: bool,
    fields: list[pa.Field],
) -> tuple[list[int], dict[str, list[Any]]]:
    """The result columns of rows [start, start + num_rows), and which input row of the batch each belongs to."""
    is_cancelled = Request.state == RequestState.CANCELLED
    statement = (
        select(
            Request.row_index,
            Output.text.label("forq_output"),
            func.coalesce(Request.error_code, case((is_cancelled, "cancelled"))).label("forq_error_code"),
            func.coalesce(Request.error, case((is_cancelled, CANCELLED_TEXT))).label("forq_error"),
            *(_column(field.name) for field in RESULT_FIELDS if field.name not in _OF_REQUEST),
            *(_STORED_AS_JSON[field.name].label(field.name) for field in fields if field.name in _STORED_AS_JSON),
            *([Request.payload.label(REQUEST_FIELD.name)] if REQUEST_FIELD in fields else []),
        )
        .select_from(Request)
        .outerjoin(Output, Output.request_id == Request.id)
        .outerjoin(
            RequestStats, (RequestStats.request_id == Output.request_id) & (RequestStats.sample == Output.sample)
        )
        .where(Request.job_id == job_id, Request.row_index >= start, Request.row_index < start + num_rows)
        .order_by(Request.row_index, Output.sample)
    )
    if failed_only:
        statement = statement.where(Request.state == RequestState.FAILED)
    rows = connection.execute(statement).all()
    stored = [field.name for field in fields if field is not TREE_FIELD]
    columns: dict[str, list[Any]] = {name: [row._mapping[name] for row in rows] for name in stored}
    for name in _STORED_AS_JSON.keys() & columns.keys():
        columns[name] = [None if text is None else json.loads(text) for text in columns[name]]
    if TREE_FIELD in fields:
        trees = _trees(connection, job_id, start, num_rows)
        columns[TREE_FIELD.name] = [trees.get((row.row_index, row.forq_sample)) for row in rows]
    return [row.row_index - start for row in rows], columns


def _column(name: str) -> Any:
    table = Output if name in _OF_OUTPUT else RequestStats
    return getattr(table, name.removeprefix("forq_")).label(name)


def _trees(
    connection: Connection, job_id: str, start: int, num_rows: int
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    names = [f.name for f in TREE_TYPE.value_type]
    statement = (
        select(Request.row_index, ThreadNode.sample, *(getattr(ThreadNode, name) for name in names))
        .join(Request, Request.id == ThreadNode.request_id)
        .where(Request.job_id == job_id, Request.row_index >= start, Request.row_index < start + num_rows)
        .order_by(Request.row_index, ThreadNode.sample, ThreadNode.node)
    )
    trees: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in connection.execute(statement):
        node = {name: getattr(row, name) for name in names}
        trees.setdefault((row.row_index, row.sample), []).append(node)
    return trees


def open_sink(format: str, path: Path, schema: pa.Schema) -> "ParquetSink | JsonlSink":
    """What writes record batches to a file, `parquet` or `jsonl`; a context manager."""
    return (ParquetSink if format == "parquet" else JsonlSink)(path, schema)


class ParquetSink:
    """Collects batches into row groups of a useful size; no statistics, whose footer would leak prompts."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", write_statistics=False)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._waiting_bytes = [], 0

    def __enter__(self) -> "ParquetSink":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()


class JsonlSink:
    """One JSON object a line; what JSON has no type for (dates, bytes, decimals) is written as text."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [_json_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            self._file.write(_json_line(dict(zip(batch.schema.names, row, strict=True))) + "\n")

    def __enter__(self) -> "JsonlSink":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:  # JSON has no NaN and no infinity
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_as_text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (pa.ArrowException, ValueError, OverflowError):
        return [_json_value(scalar) for scalar in column]


def _json_value(scalar: pa.Scalar) -> Any:
    """A value that Python's types cannot hold (nanoseconds, a text that is not UTF-8), or that has one inside."""
    try:
        return scalar.as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        kind = scalar.type
    if pa.types.is_dictionary(kind):
        return _json_value(scalar.value)
    if pa.types.is_struct(kind):
        return {kind.field(i).name: _json_value(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_nested(kind):
        return [_json_value(item) for item in scalar.values]
    if pa.types.is_temporal(kind):
        return scalar.cast(pa.string()).as_py()
    return scalar.as_buffer().to_pybytes().decode(errors="replace")


def _as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
