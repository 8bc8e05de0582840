"""Receives a multipart upload: the file goes to disk as it arrives, under a limit; the form fields stay in memory.

Starlette's form parser is not used because it has no limit on a file, and spools it to /tmp before it can be refused.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from api.scratch import PREFIX
from jobs.errors import BadInput
from jobs.source import check_suffix

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FILE_FIELD = "file"
URL_FIELD = "url"
"""May stand in the file's place."""
MAX_FIELDS = 32
MAX_FIELDS_BYTES = 4 << 20
"""All form fields together; the largest is a template of at most a million characters."""
FRAME_BYTES = 64 << 10
"""What boundaries and part headers may add."""
WRITE_BYTES = 1 << 20
MAX_NAME_CHARS = 60  # 240 bytes at most: file systems allow 255


@dataclass
class Upload:
    path: Path | None
    """The file, under the name its sender gave it as far as that is harmless: messages quote it.
    None: there is a url."""
    fields: dict[str, str]
    lists: dict[str, list[str]]
    """The fields that may be given several times, their values in order."""


@asynccontextmanager
async def receive_upload(
    request: Request,
    folder: Path,
    max_file_bytes: int,
    repeated: tuple[str, ...] = (),
    check_name: Callable[[Path], None] = check_suffix,
) -> AsyncIterator[Upload]:
    """Read the request's body; the file is there for as long as the context is open.

    Args:
        repeated: fields that may be given several times.
        check_name: may refuse the file by its name, before it has come.

    Raises:
        HTTPException: 400 malformed body, 413 file over the limit, 415 not multipart.
        BadInput: no file, a file name that forq does not read, a field twice or not UTF-8.
        ClientDisconnect: the sender went away.
    """
    boundary = _boundary(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_file_bytes + MAX_FIELDS_BYTES + FRAME_BYTES:
        raise too_large(max_file_bytes)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}upload-", dir=folder) as scratch:
        parts = _Parts(Path(scratch), max_file_bytes, check_name, lists={name: [] for name in repeated})
        parser = MultipartParser(boundary, parts.callbacks())
        try:
            async for chunk in request.stream():
                parser.write(chunk)
                if len(parts.unwritten) >= WRITE_BYTES:
                    await run_in_threadpool(parts.flush)
            await run_in_threadpool(parts.flush)
        except FormParserError:
            raise HTTPException(400, "the body is not well-formed multipart/form-data") from None
        finally:
            parts.close()
        if not parts.is_complete:
            raise HTTPException(400, "the body ends before its closing boundary")
        if parts.path is None and URL_FIELD not in parts.fields:
            raise BadInput(
                f"the form has no file: send it as the part {FILE_FIELD!r}, with a file name, or say {URL_FIELD}"
            )
        if parts.path is not None and URL_FIELD in parts.fields:
            raise BadInput(f"the form has a {FILE_FIELD} and a {URL_FIELD}: a job is made of one")
        yield Upload(parts.path, parts.fields, {name: values for name, values in parts.lists.items() if values})


def too_large(max_file_bytes: int) -> HTTPException:
    return HTTPException(
        413, f"the upload is over {max_file_bytes} bytes: split the file, or raise limits.max_upload_bytes"
    )


def safe_name(name: str) -> str:
    """A sender's file name without folders or odd characters, its suffix kept."""
    base = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[^\w.\- ]", "_", base)[-MAX_NAME_CHARS:].lstrip(". ") or "upload"


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise HTTPException(415, "send the file as multipart/form-data")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:  # RFC 2046, section 5.1.1
        raise HTTPException(400, "the Content-Type has no usable multipart boundary")
    return boundary


@dataclass
class _Parts:
    """The parser's callbacks; they only collect, `flush` writes."""

    scratch: Path
    max_file_bytes: int
    check_name: Callable[[Path], None]
    path: Path | None = None
    fields: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    unwritten: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    _file: BinaryIO | None = None
    _file_bytes: int = 0
    _fields_bytes: int = 0
    _num_parts: int = 0
    _header_name: bytes = b""
    _header_value: bytes = b""
    _disposition: bytes = b""
    _field_name: str | None = None
    """None while the current part is the file."""
    _field_data: bytearray = field(default_factory=bytearray)

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def flush(self) -> None:
        if self._file is not None and self.unwritten:
            self._file.write(self.unwritten)
            self.unwritten = bytearray()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise BadInput(f"the form has over {MAX_FIELDS} parts")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise HTTPException(400, "a part has no name in its Content-Disposition")
        name = _text(options[b"name"], "a part's name")
        if name != FILE_FIELD:
            if name in self.fields:
                raise BadInput(f"form field {name!r} is given twice: give it once")
            self._field_name, self._field_data = name, bytearray()
            return
        if self.path is not None:
            raise BadInput("the form has two files: a job is made of one")
        if b"filename" not in options:
            raise BadInput(f"the part {FILE_FIELD!r} has no file name: its suffix says Parquet or JSONL")
        self._field_name = None
        self.path = self.scratch / safe_name(_text(options[b"filename"], "the file name"))
        self.check_name(self.path)  # now, not after gigabytes
        self._file = self.path.open("wb")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field_name is None:
            self._file_bytes += end - start
            if self._file_bytes > self.max_file_bytes:
                raise too_large(self.max_file_bytes)
            self.unwritten += data[start:end]
            return
        self._fields_bytes += end - start
        if self._fields_bytes > MAX_FIELDS_BYTES:
            raise BadInput(f"the form fields hold over {MAX_FIELDS_BYTES} bytes: shorten the template")
        self._field_data += data[start:end]

    def _on_part_end(self) -> None:
        name = self._field_name
        if name is not None:
            value = _text(bytes(self._field_data), f"form field {name!r}")
            if name in self.lists:
                self.lists[name].append(value)
            else:
                self.fields[name] = value

    def _on_end(self) -> None:
        self.is_complete = True


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what} is not UTF-8") from None
