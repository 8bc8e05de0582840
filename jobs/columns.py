"""Arrow columns as Python values, where one unreadable value spoils its own row only."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.messages import BadText
from jobs.source import first_line


def to_python(column: pa.Array) -> list[Any]:
    """Values of a column; a string that is not UTF-8 becomes `BadText`, alone, instead of failing the batch."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [_decode(value) for value in column.to_pylist()]
    try:
        column.validate(full=True)
        return list(column.to_pylist())
    except (pa.ArrowException, ValueError, OverflowError):
        pass
    if pa.types.is_temporal(column.type):  # nanoseconds and years that Python's own types cannot hold
        return list(pc.cast(column, pa.string()).to_pylist())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        as_binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        return [_decode(value) for value in pc.cast(column, as_binary, safe=False).to_pylist()]
    values: list[Any] = []
    for scalar in column:  # nested: find the rows that are damaged one by one
        try:
            values.append(scalar.as_py())
        except UnicodeDecodeError:
            values.append(BadText("a text in this row is not valid UTF-8: write it again as UTF-8"))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            values.append(BadText(f"a value in this row cannot be read ({first_line(error)}): write it as text"))
    return values


def _decode(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        bad = value[error.start : error.start + 1].hex()
        return BadText(f"byte {error.start} (0x{bad}) is not valid UTF-8: write the text again as UTF-8")


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        check(kind)
        for check in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )


def is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    names = {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
    return {"role", "content"} <= names
