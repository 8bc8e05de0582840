"""Objects of S3 and GCS through pyarrow: one read to a local file, one written from a local file, in bounded memory.

Runs in the process that `transfer.py` starts, and nowhere else: see `upload`.
"""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.fs as pafs

from jobs.errors import BadInput, ForqError, Unavailable
from jobs.remote import local
from jobs.remote.urls import Url
from jobs.storage_settings import StorageRoot, StorageSettings

CHUNK_BYTES = 8 << 20
"""Of a read: one request each."""
Report = Callable[[int, int], None]
"""Told of bytes done and bytes in all."""

_AWS_ERROR = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+)")
_GCS_ERROR = re.compile(r"\b(UNAUTHENTICATED|UNAVAILABLE|[A-Z]+_[A-Z_]+)\b")
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID",
           "MISSING_AUTHENTICATION_TOKEN", "EXPIRED_TOKEN", "PERMISSION_DENIED", "UNAUTHENTICATED")  # fmt: skip
_UNREACHED = ("NETWORK_CONNECTION", "REQUEST_TIMEOUT", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def download(
    url: Url, root: StorageRoot, settings: StorageSettings, target: Path, max_bytes: int, report: Report
) -> None:
    """Copy an object to a file that is not there yet.

    Raises:
        BadInput: not there, too large, no right to read it, written to while it was read.
        Unavailable: its server cannot be reached, or fails.
        OSError: the local file cannot be written.
    """
    if url.scheme == "file":
        _download_local(url, root, target, max_bytes, report)
        return
    place = f"{url.bucket}/{url.key}"
    try:
        filesystem = _filesystem(root, settings)
        info = filesystem.get_file_info(place)
        if info.type != pafs.FileType.File:
            raise _missing(url, filesystem, info.type)
        _check_size(url, info.size, max_bytes)
        stream = filesystem.open_input_stream(place)
        before = _version(stream)
    except OSError as error:
        raise explain(error, url, "read") from None
    try:
        _copy(_Guarded(stream), target, info.size, max_bytes, report)
        with filesystem.open_input_stream(place) as again:
            after = _version(again)
    except _RemoteError as error:
        # Its server refuses ranges that are no longer there: what happened is told by another look.
        if _is_another(filesystem, place, before):
            raise _changed(url) from None
        raise explain(error.cause, url, "read") from None
    except FileNotFoundError:
        raise _changed(url) from None
    if before != after or target.stat().st_size != info.size:
        raise _changed(url)


def _download_local(url: Url, root: StorageRoot, target: Path, max_bytes: int, report: Report) -> None:
    with local.open_input(url, root.parsed) as source:
        before = local.identity(source)
        _check_size(url, before[1], max_bytes)
        _copy(source, target, before[1], max_bytes, report)
        if local.identity(source) != before or target.stat().st_size != before[1]:
            raise _changed(url)


def upload(path: Path, url: Url, root: StorageRoot, settings: StorageSettings, report: Report) -> None:
    """Copy a whole local file to an object, which appears when the last byte is there and replaces one of its name.

    After an error the caller must end the process without unwinding (`os._exit`): pyarrow closes a stream that it
    destroys, and so would complete the upload of a part. An upload that is not completed is invisible.

    Raises:
        BadInput: no such bucket or folder, no right to write there.
        Unavailable: its server cannot be reached, or fails.
        OSError: the local file cannot be read.
    """
    total = path.stat().st_size
    with path.open("rb") as source:
        if url.scheme == "file":
            local.publish(url, root.parsed, _chunks(source, total, report))
            return
        place = f"{url.bucket}/{url.key}"
        try:
            filesystem = _filesystem(root, settings)
            stream = filesystem.open_output_stream(place)
        except OSError as error:
            raise explain(error, url, "write") from None
        for chunk in _chunks(source, total, report):
            try:
                stream.write(chunk)
            except OSError as error:
                raise explain(error, url, "write") from None
        try:
            stream.close()
            stored = filesystem.get_file_info(place).size
        except OSError as error:
            raise explain(error, url, "write") from None
    if stored != total:
        raise Unavailable(f"{url}: {total} bytes were written, its server has {stored}: write it again")


def explain(error: BaseException, url: Url, verb: str) -> ForqError:
    """One line for an error of pyarrow, by its code: the text may hold what the server said, or who asked."""
    aws, gcs = _AWS_ERROR.search(str(error)), _GCS_ERROR.search(str(error))
    code = aws[1] if aws else gcs[1] if gcs else type(error).__name__
    status = aws[2] if aws else None
    where = "AWS_ENDPOINT_URL" if url.scheme == "s3" else "STORAGE_EMULATOR_HOST"
    if code == "NO_SUCH_BUCKET":
        return BadInput(f"{url}: there is no bucket {url.bucket!r}: make it, or correct the URL")
    if isinstance(error, FileNotFoundError) or code in ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "NOT_FOUND"):
        return BadInput(f"{url}: no such object or bucket: correct the URL")
    if code in _DENIED or status in ("401", "403"):
        return BadInput(
            f"{url}: its server denies the right to {verb} it ({code}): check the credentials in the environment, and "
            "what they may do"
        )
    if code in _UNREACHED:
        return Unavailable(
            f"{url}: its server cannot be reached ({code}): check the network, and {where} or the root's "
            "endpoint_override"
        )
    if status in ("301", "307", "400") and url.scheme == "s3":
        return Unavailable(f"{url}: its server answers {status} ({code}): check the region, AWS_REGION or the root's")
    return Unavailable(f"{url}: its server failed ({code}{f', HTTP {status}' if status else ''}): try again later")


class _RemoteError(Exception):
    """Reading failed at the far end; an OSError of the local file must stay one."""

    def __init__(self, cause: OSError) -> None:
        super().__init__()
        self.cause = cause


class _Guarded:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, num_bytes: int) -> bytes:
        try:
            data: bytes = self._stream.read(num_bytes)
            return data
        except OSError as error:
            raise _RemoteError(error) from None


def _filesystem(root: StorageRoot, settings: StorageSettings) -> pafs.FileSystem:
    scheme, _, address = (root.endpoint_override or "").rpartition("://")
    endpoint: dict[str, Any] = {"endpoint_override": address, "scheme": scheme} if address else {}
    if root.parsed.scheme == "gs":
        return pafs.GcsFileSystem(
            anonymous=root.anonymous, retry_time_limit=timedelta(seconds=settings.request_timeout_s), **endpoint
        )
    return pafs.S3FileSystem(
        anonymous=root.anonymous,
        region=root.region,
        connect_timeout=settings.connect_timeout_s,
        request_timeout=settings.request_timeout_s,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=settings.max_attempts),
        background_writes=False,  # which would take parts into memory faster than they leave
        **endpoint,
    )


def _missing(url: Url, filesystem: pafs.FileSystem, kind: pafs.FileType) -> BadInput:
    if kind == pafs.FileType.Directory:
        return BadInput(f"{url} is a folder: name a file in it")
    if filesystem.get_file_info(url.bucket).type == pafs.FileType.NotFound:
        return BadInput(f"{url}: there is no bucket {url.bucket!r}: make it, or correct the URL")
    return BadInput(f"{url}: no such object: correct the URL")


def _check_size(url: Url, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BadInput(
            f"{url} has {num_bytes} bytes, the limit is {max_bytes}: split it, or raise limits.max_upload_bytes"
        )


def _version(stream: Any) -> dict[str, bytes]:
    """What changes with an object's content."""
    names = ("etag", "content-length", "last-modified", "generation", "updated")
    return {name: value for key, value in stream.metadata().items() if (name := key.lower()) in names}


def _is_another(filesystem: pafs.FileSystem, place: str, before: dict[str, bytes]) -> bool:
    try:
        with filesystem.open_input_stream(place) as stream:
            return _version(stream) != before
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _changed(url: Url) -> BadInput:
    return BadInput(f"{url} was written to while it was read: submit it when it is complete")


def _copy(source: Any, target: Path, total: int, max_bytes: int, report: Report) -> None:
    done = 0
    with target.open("xb") as file:
        while done < max_bytes and (chunk := source.read(min(CHUNK_BYTES, max_bytes - done))):
            file.write(chunk)
            done += len(chunk)
            report(done, max(done, total))


def _chunks(source: BinaryIO, total: int, report: Report) -> Iterator[bytes]:
    done = 0
    report(done, total)
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
        done += len(chunk)
        report(done, total)
