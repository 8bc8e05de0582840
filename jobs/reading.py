"""Reads a submitted file: every row checked, as requests, in a spool file.

In: the file, what the user said of it, the limits. Out: `Reading`, plain data about the spool. It touches no database
and keeps nothing, so that it can run in a process of its own (`jobs.confined`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from jobs import store
from jobs.batch_check import BatchRules, check_lines
from jobs.errors import BadInput
from jobs.rows import Mapping, RowReader, columns_of, make_mapping
from jobs.settings import Limits
from jobs.source import Progress, is_jsonl, iter_batches, max_line_bytes, open_source

ROW_COLUMNS = ("custom_id", "payload", "sampling", "error_code", "error")
SPOOL_SCHEMA = pa.schema([(name, pa.large_string()) for name in ROW_COLUMNS])


@dataclass(frozen=True)
class Request:
    """What is to be read, and how."""

    path: Path
    model: str
    prompt_column: str | None
    messages_column: str | None
    template: str | None
    id_column: str | None
    shard_rows: int
    system: str | None = None
    turn: tuple[str, ...] = ()
    decoding: str = "ar"
    also_called: str | None = None
    """Another name that batch lines may use for the model."""
    rules: BatchRules | None = None
    """For a batch of the OpenAI-compatible API; its lines then say the model and the decoding."""


@dataclass(frozen=True)
class Reading:
    """A file that was read to its end."""

    mapping: Mapping
    spool: Path
    """Arrow stream of `SPOOL_SCHEMA`, every row of the file in order."""
    failed_per_shard: list[int]
    num_rows: int
    kept: Path
    """The Parquet file to keep: the submitted one, or what was made of JSONL."""
    version: store.Version
    """Of `kept`, before it was read."""
    model: str
    decoding: str

    @property
    def num_to_answer(self) -> int:
        """Rows that were not refused."""
        return self.num_rows - sum(self.failed_per_shard)


def read(request: Request, limits: Limits, scratch: Path, report: Progress) -> Reading:
    """
    Raises:
        BadInput: the file or what was said of it cannot be used.
    """
    path = request.path
    if request.rules is not None:
        request = _as_agreed(request, request.rules, limits, report)
    with open_source(path, limits, scratch, report) as source:
        mapping = make_mapping(
            source.file.schema_arrow,
            path,
            prompt_column=request.prompt_column,
            messages_column=request.messages_column,
            template=request.template,
            id_column=_id_column(request, source.file.schema_arrow),
            system=request.system,
            turn=request.turn,
        )
        reader = RowReader(
            mapping, source.file.schema_arrow, limits, request.model, request.decoding, request.also_called
        )
        total = source.file.metadata.num_rows
        failed_per_shard = [0] * -(-total // request.shard_rows)
        num_rows = 0
        spool = scratch / "rows.arrow"
        with pa.OSFile(str(spool), "wb") as sink, pa.ipc.new_stream(sink, SPOOL_SCHEMA) as writer:
            for batch in iter_batches(source.file, columns_of(mapping), path.name):
                rows = list(reader.prepare(batch))
                if num_rows + len(rows) > total:
                    raise BadInput(f"{path.name} says it has {total} rows but holds more: write it again")
                for index, row in enumerate(rows, start=num_rows):
                    if row.error_code is not None:
                        failed_per_shard[index // request.shard_rows] += 1
                num_rows += len(rows)
                columns = [[getattr(row, name) for row in rows] for name in SPOOL_SCHEMA.names]
                writer.write_batch(pa.record_batch(columns, schema=SPOOL_SCHEMA))
                report("reading", num_rows, total)
        if num_rows != total:
            raise BadInput(f"{path.name} says it has {total} rows but holds {num_rows}: write it again")
        return Reading(
            mapping, spool, failed_per_shard, num_rows, source.path, source.version, request.model, request.decoding
        )


def _as_agreed(request: Request, rules: BatchRules, limits: Limits, report: Progress) -> Request:
    """With the model and the decoding that the lines of a batch agree on; Parquet's were said beside it."""
    if not is_jsonl(request.path):
        return replace(request, model=rules.model or rules.default_model, decoding=rules.decoding or "ar")
    agreed = check_lines(request.path, rules, max_line_bytes(limits), report)
    return replace(request, model=agreed.model, decoding=agreed.decoding)


def _id_column(request: Request, schema: pa.Schema) -> str | None:
    """A batch has custom ids: where no column is named for them, one of that name."""
    if request.id_column is None and request.rules is not None and "custom_id" in schema.names:
        return "custom_id"
    return request.id_column
