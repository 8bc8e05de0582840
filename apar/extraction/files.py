"""Parquet in, Parquet out: every answer of a file through `extract`, on all cores, in bounded memory.

Receives a file with a prompt and a response column; hands on a file with the same rows and columns, without the dropped
answers, and with `kind`, `reason` and `nodes`. Batches go to worker processes and come back in order; only so many are
under way at once. The result is written beside OUT and renamed into place when it is complete.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from apar.errors import AparError, InputError
from apar.extraction.extract import extract
from apar.extraction.options import Extraction, Options, Rules
from apar.extraction.report import Report
from apar.files import replacing

NODE_TYPE = pa.struct(
    [
        ("node", pa.int32()),
        ("first_child", pa.int32()),
        ("next_sibling", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("text", pa.string()),
    ]
)
ADDED = (("kind", pa.string()), ("reason", pa.string()), ("nodes", pa.list_(NODE_TYPE)))
_BATCH_ROWS = 128
_BATCHES_PER_PROCESS = 2
"""Under way at once: one being worked on, one ready to follow."""
_ALONE_ROWS = 512
"""Files up to this are done here: worker processes take longer to start."""
_READ_BUFFER_BYTES = 1 << 20

Advance = Callable[[int, int], None]


def extract_file(
    source: Path,
    target: Path,
    rules: Rules = "markdown",
    options: Options | None = None,
    *,
    prompt_column: str = "prompt",
    response_column: str = "response",
    keep_dropped: bool = False,
    num_processes: int | None = None,
    advance: Advance = lambda done, total: None,
) -> Report:
    """Extract every answer of `source` into `target`.

    `num_processes` is all cores by default; `advance` is told rows done and rows in all.

    Raises:
        InputError: if the file, a column or the target cannot be used; nothing was written then.
        AparError: if a worker process died.
    """
    options = options or Options()
    extract(".", rules, options)  # refuses unknown rules before a file is touched
    if num_processes is not None and num_processes < 1:
        raise InputError(f"processes is {num_processes}: use 1 or more")
    file = _open(source)
    schema = _output_schema(source, file.schema_arrow, prompt_column, response_column)
    _check_target(source, target)
    total = file.metadata.num_rows
    processes = 1 if total <= _ALONE_ROWS else num_processes or _num_cores()
    report = Report(rules)
    try:
        with replacing(target) as new, pq.ParquetWriter(new, schema, compression="zstd") as writer:
            for batch, outcomes in _in_order(source, file, response_column, rules, options, processes):
                for outcome in outcomes:
                    report.count(outcome)
                table = _output(batch, response_column, outcomes, schema, keep_dropped)
                if table.num_rows:
                    writer.write_table(table)
                advance(report.num_rows, total)
    except BrokenProcessPool as error:
        raise AparError("a worker process died, for want of memory perhaps: use fewer processes") from error
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    return report


def _open(source: Path) -> pq.ParquetFile:
    if not source.is_file():
        raise InputError(f"{source} is not a file: name a Parquet file")
    try:
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{source} cannot be read as Parquet: {_one_line(error)}") from error


def _output_schema(source: Path, schema: pa.Schema, prompt_column: str, response_column: str) -> pa.Schema:
    for name in (prompt_column, response_column):
        number = schema.get_all_field_indices(name)
        if len(number) != 1:
            found = ", ".join(schema.names[:20]) or "none"
            fault = f"has no column {name!r}" if not number else f"has {len(number)} columns {name!r}"
            raise InputError(f"{source} {fault}: its columns are {found}")
        kind = schema.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise InputError(f"column {name!r} of {source} holds {kind}: a column of strings is needed")
    for name, _ in ADDED:
        if name in schema.names:
            raise InputError(f"{source} has a column {name!r}, which extraction adds: rename or drop it")
    for name, kind in ADDED:
        schema = schema.append(pa.field(name, kind))
    return schema


def _check_target(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        raise InputError(f"{target} is the input as well: name another file for the output")
    if target.is_dir():
        raise InputError(f"{target} is a folder: name a file for the output")


def _in_order(
    source: Path, file: pq.ParquetFile, column: str, rules: Rules, options: Options, processes: int
) -> Iterator[tuple[pa.RecordBatch, list[Extraction]]]:
    """Batches with their outcomes, in the file's order."""
    batches = _batches(source, file)
    if processes == 1:
        for batch in batches:
            yield batch, _extract_all(_texts(batch.column(column)), rules, options)
        return
    under_way: deque[tuple[pa.RecordBatch, Future[list[Extraction]]]] = deque()
    # Spawned, not forked: the parent has pyarrow's threads, whose locks a fork would copy as they are.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_leave_interrupts_to_the_parent)
    try:
        for batch in batches:
            under_way.append((batch, pool.submit(_extract_all, _texts(batch.column(column)), rules, options)))
            if len(under_way) >= processes * _BATCHES_PER_PROCESS:
                first, outcomes = under_way.popleft()
                yield first, outcomes.result()
        while under_way:
            first, outcomes = under_way.popleft()
            yield first, outcomes.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(source: Path, file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size=_BATCH_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{source} cannot be read as Parquet: {_one_line(error)}") from error


def _texts(column: pa.Array) -> list[str | bytes | None]:
    """The answers; bytes where a file claims text and has none."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return list(column.cast(pa.large_binary()).to_pylist())


def _extract_all(texts: list[str | bytes | None], rules: Rules, options: Options) -> list[Extraction]:
    return [_extract_one(text, rules, options) for text in texts]


def _extract_one(text: str | bytes | None, rules: Rules, options: Options) -> Extraction:
    if text is None:
        return Extraction(None, "null_response", None)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return Extraction(None, "not_utf8", None)
    return extract(text, rules, options)


def _output(
    batch: pa.RecordBatch, column: str, outcomes: list[Extraction], schema: pa.Schema, keep_dropped: bool
) -> pa.Table:
    kept = [index for index, outcome in enumerate(outcomes) if keep_dropped or outcome.kind is not None]
    table = pa.Table.from_batches([batch]).take(pa.array(kept, pa.int64()))
    texts = _texts(table.column(column).combine_chunks())
    rows = [outcomes[index] for index in kept]
    added: list[list[Any]] = [
        [row.kind for row in rows],
        [row.reason for row in rows],
        [_node_rows(text, row) for text, row in zip(texts, rows, strict=True)],
    ]
    arrays = [pa.array(values, kind) for values, (_, kind) in zip(added, ADDED, strict=True)]
    return pa.Table.from_arrays([*table.columns, *arrays], schema=schema)


def _node_rows(text: str | bytes | None, row: Extraction) -> list[dict[str, Any]] | None:
    if row.nodes is None or text is None:
        return None
    answer = text.decode() if isinstance(text, bytes) else text
    return [
        {
            "node": number,
            "first_child": node.first_child,
            "next_sibling": node.next_sibling,
            "start": node.start,
            "end": node.end,
            "text": answer[node.start : node.end],
        }
        for number, node in enumerate(row.nodes)
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _one_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
