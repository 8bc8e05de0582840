"""Data on its way out, as a Parquet file; answers on their way in, as Arrow batches. Both in bounded memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 65_536
BATCH_ROWS = 1024


class ArrowStream(Protocol):
    """Anything with the Arrow PyCapsule interface: Arrow's tables and readers, DataFrames of pandas and polars."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Data: TypeAlias = "str | Path | ArrowStream"
"""A file's path, a URL that the service may read, or a table."""


def write_parquet(data: Any, path: Path) -> None:
    """Write a table of any kind, batch by batch.

    Raises:
        TypeError: it is none, or has a column of a type that Parquet does not have.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if not hasattr(data, "__arrow_c_stream__"):
        raise TypeError(
            f"submit() got a {type(data).__name__}: give a path, a URL, an Arrow table or reader, or a DataFrame that "
            "has __arrow_c_stream__"
        )
    try:
        _write(data, path)
    except pa.ArrowException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TypeError(
            f"submit(): this {type(data).__name__} is no table that Parquet can hold ({reason}): cast the column to "
            "text, numbers, lists or structs of these, or drop it"
        ) from None


def _write(data: ArrowStream, path: Path) -> None:
    reader = pa.RecordBatchReader.from_stream(data)
    # No statistics: the footer would have texts in it.
    with pq.ParquetWriter(path, reader.schema, compression="zstd", write_statistics=False) as writer:
        waiting: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in reader:
            waiting.append(batch)
            num_bytes += batch.nbytes
            if num_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(waiting), row_group_size=ROW_GROUP_ROWS)
                waiting, num_bytes = [], 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting), row_group_size=ROW_GROUP_ROWS)


def read_batches(path: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    # Small buffers: whole column chunks in memory cost hundreds of MB on large row groups.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        yield from file.iter_batches(batch_size=batch_rows)
