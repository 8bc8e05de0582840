"""Opens a submitted file and reads it in bounded memory, as Arrow batches.

Two formats: Parquet, and OpenAI batch JSONL (by file suffix), which becomes the Parquet columns `custom_id`, `method`,
`url` and `body`. Everything wrong with the file as a whole is found here, at submit, and refused with one line.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import store
from jobs.errors import BadInput
from jobs.faults import no_column
from jobs.settings import Limits

PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
BATCH_ROWS = 256
"""Small on purpose: a tiny file can hold cells that expand a million times, and a batch is in memory at once."""

Progress = Callable[[str, int, int], None]
"""Called with the phase's name, what is done (rows, or bytes of JSONL), and how much there is."""

BATCH_LINE_SCHEMA = pa.schema(
    [("custom_id", pa.string()), ("method", pa.string()), ("url", pa.string()), ("body", pa.string())]
)


def check_suffix(path: Path) -> None:
    """Raises BadInput: if the file's name does not say Parquet or JSONL."""
    if path.suffix.lower() not in PARQUET_SUFFIXES + JSONL_SUFFIXES:
        if path.is_dir():
            raise BadInput(f"{path} is a directory: name a file")
        known = ", ".join(PARQUET_SUFFIXES + JSONL_SUFFIXES)
        raise BadInput(f"{path.name}: the suffix is {path.suffix!r}; forq reads {known}")


def is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES


def open_parquet(path: Path, limits: Limits | None) -> pq.ParquetFile:
    """Open a Parquet file and check what its footer tells; without limits where it was accepted before (the export).

    Raises:
        BadInput: not there, not Parquet, truncated, no rows, too many rows, a column name twice.
    """
    _require_file(path)
    try:
        # Small buffers: whole column chunks in memory cost hundreds of MB on large row groups.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path.name} is not a readable Parquet file ({first_line(error)}): write it again") from None
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise BadInput(f"{path.name} has {len(twice)} column name(s) twice ({', '.join(twice)}): rename one of each")
    reserved = [name for name in schema.names if name.startswith("forq_")]
    if reserved:
        raise BadInput(
            f"{path.name} has column(s) {', '.join(reserved)}: names that begin with forq_ are the results'; "
            "rename them in the input"
        )
    if num_rows == 0:
        raise BadInput(f"{path.name} has 0 rows: at least 1 is needed")
    if limits is not None and num_rows > limits.max_rows:
        raise BadInput(
            f"{path.name} has {num_rows} rows, the limit is {limits.max_rows}: split it or raise limits.max_rows"
        )
    return file


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise BadInput(f"{path}: not a regular file" if path.exists() else f"{path}: no such file")


@dataclass(frozen=True)
class Source:
    """A submitted file, open for reading."""

    file: pq.ParquetFile
    path: Path
    """Where the Parquet file lies: the submitted one, or in the scratch folder what was made of JSONL."""
    version: store.Version


@contextmanager
def open_source(
    path: Path, limits: Limits, scratch: Path, report: Progress = lambda phase, done, total: None
) -> Iterator[Source]:
    """Open a submitted file of either format.

    Args:
        report: told of the progress of making Parquet of JSONL, with bytes done and bytes in all.

    Raises:
        BadInput: see `check_suffix`, `jsonl_to_parquet` and `open_parquet`.
    """
    check_suffix(path)
    parquet = path
    if is_jsonl(path):
        parquet = scratch / f"{path.stem}.parquet"
        jsonl_to_parquet(path, parquet, limits, report)
    version = store.version_of(parquet)  # before it is opened: later, it could be another file's already
    with open_parquet(parquet, limits) as file:
        yield Source(file, parquet, version)


def require_column(schema: pa.Schema, name: str, path: Path) -> None:
    if name not in schema.names:
        raise BadInput(no_column(path.name, name, schema.names))


def iter_batches(file: pq.ParquetFile, columns: list[str] | None, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows in order, `BATCH_ROWS` at a time.

    Raises:
        BadInput: if a page cannot be decoded; the rows before it have been yielded by then.
    """
    num_read = 0
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield batch
            num_read += batch.num_rows
    except MemoryError:  # Arrow's is an ArrowException, too, and the file is not damaged
        raise
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{name} is damaged after row {num_read} ({first_line(error)}): write it again") from None


def max_line_bytes(limits: Limits) -> int:
    """A line is read up to this, so that a file without line ends does not fill the memory. JSON may write a character
    in six bytes."""
    return 6 * limits.max_cell_bytes + (64 << 10)


def jsonl_to_parquet(
    source: Path,
    target: Path,
    limits: Limits,
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> None:
    """Read OpenAI batch lines and write them as Parquet, one row a line.

    Only the line's frame is checked here; the body is checked row by row like any other, so that one bad body does not
    refuse the file.

    Raises:
        BadInput: a line that is not a JSON object with `custom_id`, `url` and `body`, a `custom_id` twice, no lines.
    """
    _require_file(source)
    seen: set[str] = set()
    num_rows = 0
    num_bytes = source.stat().st_size
    with source.open("rb") as lines, pq.ParquetWriter(target, BATCH_LINE_SCHEMA, write_statistics=False) as writer:
        chunk: list[dict[str, str]] = []
        longest = max_line_bytes(limits)
        for number, line in enumerate(iter(lambda: lines.readline(longest + 1), b""), start=1):
            if len(line) > longest:
                raise BadInput(
                    f"{source.name} line {number} has over {longest} bytes: shorten it or raise limits.max_cell_bytes"
                )
            if not line.strip():
                continue
            row = _batch_line(line, number, source.name)
            if row["custom_id"] in seen:
                raise BadInput(
                    f"{source.name} line {number}: custom_id {row['custom_id']!r} occurs twice: make it unique"
                )
            seen.add(row["custom_id"])
            num_rows += 1
            if num_rows > limits.max_rows:
                raise BadInput(f"{source.name} has over {limits.max_rows} lines: split it or raise limits.max_rows")
            chunk.append(row)
            if len(chunk) == 1024:
                writer.write_table(pa.Table.from_pylist(chunk, schema=BATCH_LINE_SCHEMA))
                chunk = []
                report("converting", lines.tell(), num_bytes)
        if chunk:
            writer.write_table(pa.Table.from_pylist(chunk, schema=BATCH_LINE_SCHEMA))
    if num_rows == 0:
        raise BadInput(f"{source.name} has 0 lines: at least 1 is needed")


def _batch_line(line: bytes, number: int, name: str) -> dict[str, str]:
    where = f"{name} line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({first_line(error)}): each line is one JSON object") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where} is a JSON {type(value).__name__}: each line is one JSON object")
    for key, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(value.get(key), kind):
            raise BadInput(f"{where}: {key!r} is missing or not a {'string' if kind is str else 'JSON object'}")
    row = {
        "custom_id": value["custom_id"],
        "method": str(value.get("method", "POST")),
        "url": value["url"],
        "body": _dump_body(value["body"], where),
    }
    try:
        for text in row.values():
            text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{where} holds half of a surrogate pair outside its body: write valid Unicode") from None
    if "\0" in row["custom_id"]:  # no database keeps it: two ids could come back as one
        raise BadInput(f"{where}: custom_id holds a NUL character: leave it out")
    return row


def _dump_body(body: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(body, ensure_ascii=True)
    except (RecursionError, ValueError):
        raise BadInput(f"{where}: its body is nested too deeply or holds a number that is too long") from None


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    line = line.partition("; use sys.set_int_max_str_digits")[0]  # a remedy for those who write Python
    # Libraries quote the file's bytes: on a terminal, a control character is a command.
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return line if len(line) <= 160 else line[:157] + "..."
