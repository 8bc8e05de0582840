"""The client and its jobs."""

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.client import tables
from jobs.client.errors import ClientError, StillRunningError
from jobs.client.options import SubmitOptions, form_of
from jobs.client.replies import JobStatus, Model, State
from jobs.client.transport import Transport, is_visible

POLL_S = 25.0
"""A long poll; the server allows 60 s, proxies often less."""
PAGE_JOBS = 100
CHUNK_BYTES = 1 << 20
_PARQUET = "application/vnd.apache.parquet"


class Client:
    """The REST API of one service. Use it as a context manager, or call `close`; threads may share it."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8765",
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        retry_for_s: float = 60.0,
    ) -> None:
        """
        Args:
            api_key: `forq_...`, of `forq keys create`.
            timeout_s: longest silence of the server; it checks a submitted file, and writes results, before it answers.
            retry_for_s: how long to wait, between the tries of one request, where nobody was found, or the answer is
                to come back later.

        Raises:
            ValueError: no URL of a service.
        """
        self._transport = Transport(base_url, api_key, timeout_s, retry_for_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def submit(
        self, data: tables.Data, *, idempotency_key: str | None = None, **options: Unpack[SubmitOptions]
    ) -> "Job":
        """Make a job of a file's or a table's rows.

        Args:
            data: a path (`.parquet`, or OpenAI batch `.jsonl`), a URL (`s3://`, `gs://`, `file://`) under one of the
                service's storage roots, or a table (Arrow, pandas, polars), which goes by way of a temporary file.
            idempotency_key: the same key again is the same job; without one each call makes a job, once, however
                often it must be sent.

        Raises:
            RefusedError: the file or an option cannot be used; nothing was stored.
            TypeError: no data, or an option that there is not, or of another type.
            ValueError: a key that no header can carry.
            FileNotFoundError: there is no such file.
            ClientError: see its kinds.
        """
        form = form_of(options)
        if idempotency_key is not None and not is_visible(idempotency_key):
            raise ValueError(f"idempotency_key is {idempotency_key!r}: give printable ASCII without spaces")
        headers = {"Idempotency-Key": idempotency_key if idempotency_key is not None else uuid.uuid4().hex}
        if isinstance(data, str) and "://" in data:
            form.append(("url", data))
            return self._submitted(form, headers, None)
        if isinstance(data, str | os.PathLike):
            return self._submitted(form, headers, Path(data))
        with tempfile.TemporaryDirectory(prefix="forq-client-") as scratch:
            path = Path(scratch) / "table.parquet"
            tables.write_parquet(data, path)
            return self._submitted(form, headers, path)

    def job(self, job_id: str) -> "Job":
        """A job by its id.

        Raises:
            NotFoundError: there is none.
        """
        return Job(self._transport, JobStatus.of(self._transport.get(f"/v1/jobs/{quote(job_id, safe='')}").json()))

    def jobs(self, *, state: State | None = None, limit: int | None = None) -> Iterator["Job"]:
        """The newest first; pages are fetched as they are needed."""
        before: str | None = None
        while limit is None or limit > 0:
            size = PAGE_JOBS if limit is None else min(limit, PAGE_JOBS)
            page = self._transport.get("/v1/jobs", limit=size, state=state, before=before).json()
            yield from (Job(self._transport, JobStatus.of(reply)) for reply in page["jobs"])
            limit = None if limit is None else limit - len(page["jobs"])
            before = page["next_before"]
            if before is None:
                return

    def models(self) -> list[Model]:
        """What a job may name as its model."""
        return [Model.of(reply) for reply in self._transport.get("/v1/models").json()["data"]]

    def _submitted(self, form: list[tuple[str, str]], headers: dict[str, str], path: Path | None) -> "Job":
        parts: list[tuple[str, Any]] = [(name, (None, value.encode())) for name, value in form]

        def send(post: Callable[..., httpx.Response]) -> httpx.Response:
            if path is None:
                return post(files=parts, headers=headers)
            with path.open("rb") as file:
                return post(files=[*parts, ("file", (path.name, file, _PARQUET))], headers=headers)

        return Job(self._transport, JobStatus.of(self._transport.post_repeatable("/v1/jobs", send).json()))


class Job:
    """A job of the service. `last_status` is what the service said last; the methods ask it."""

    def __init__(self, transport: Transport, status: JobStatus) -> None:
        self._transport = transport
        self.last_status = status

    @property
    def id(self) -> str:
        return self.last_status.job_id

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.last_status.state}>"

    def status(self) -> JobStatus:
        """Ask how it stands now."""
        return self._keep(self._transport.get(self._path()))

    def wait(self, timeout: float | None = None, progress: Callable[[JobStatus], None] | None = None) -> JobStatus:
        """Wait until it has ended, in long polls; how it ended is in the status' `state` and `counts`.

        Args:
            timeout: in seconds.
            progress: called with the status at the start and at each change.

        Raises:
            StillRunningError: the time is over.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        etag: str | None = None
        is_first = True
        while True:
            left_s = POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            wait_s = 0.0 if is_first and progress is not None else min(POLL_S, left_s)
            is_first = False
            headers = {"If-None-Match": etag} if etag is not None else None
            response = self._transport.get(self._path(), wait_s=wait_s, headers=headers, wait=f"{wait_s:.3f}")
            if response.status_code != httpx.codes.NOT_MODIFIED:
                status = self._keep(response)
                if progress is not None:
                    progress(status)
                    etag = response.headers.get("etag")
                if status.has_ended:
                    return status
            if left_s <= 0 and timeout is not None:
                raise StillRunningError(self.last_status, timeout)

    def cancel(self) -> JobStatus:
        """Stop it; rows that have finished keep their answers.

        Raises:
            ConflictError: it has ended.
        """
        return self._keep(self._transport.post(self._path("/cancel")))

    def retry(self) -> int:
        """Run its failed rows again; returns how many.

        Raises:
            ConflictError: it has not ended, or no row of it can run again.
        """
        response = self._transport.post(self._path("/retry"))
        self._keep(response)
        return int(response.json()["retried"])

    def stats(self) -> dict[str, Any]:
        """The memory receipt, key by key as `forq stats --json` has it."""
        value: dict[str, Any] = self._transport.get(self._path("/stats")).json()
        return value

    def results(
        self, *, with_trees: bool = False, failed_only: bool = False, batch_rows: int = tables.BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """The input columns and the result columns, in input order, also while it runs.

        They are downloaded to a temporary file first, and read from it batch by batch.
        """
        with tempfile.TemporaryDirectory(prefix="forq-client-") as scratch:
            path = Path(scratch) / "results.parquet"
            self._download(path, "parquet", with_trees=with_trees, failed_only=failed_only)
            yield from tables.read_batches(path, batch_rows)

    def to_table(self, *, with_trees: bool = False, failed_only: bool = False) -> pa.Table:
        """As `results`, all in memory; its `to_pandas()` is a DataFrame."""
        with tempfile.TemporaryDirectory(prefix="forq-client-") as scratch:
            path = Path(scratch) / "results.parquet"
            self._download(path, "parquet", with_trees=with_trees, failed_only=failed_only)
            return pq.read_table(path, memory_map=False)

    def download(
        self,
        path: str | Path,
        *,
        format: Literal["parquet", "jsonl"] = "parquet",
        with_trees: bool = False,
        failed_only: bool = False,
    ) -> Path:
        """As `results`, to a file that appears when it is whole. Raises FileNotFoundError: its folder is not there."""
        target = Path(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            self._download(temporary, format, with_trees=with_trees, failed_only=failed_only)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def export(
        self,
        url: str,
        *,
        format: Literal["parquet", "jsonl"] | None = None,
        with_trees: bool = False,
        failed_only: bool = False,
    ) -> int:
        """Let the service write the results to a URL under one of its storage roots; returns the number of rows."""
        body = {"url": url, "format": format, "with_trees": with_trees, "failed": failed_only}
        # Written twice, it is the same object.
        response = self._transport.post_repeatable(self._path("/export"), lambda post: post(json=body))
        return int(response.json()["rows"])

    def _download(self, path: Path, format: str, *, with_trees: bool, failed_only: bool) -> None:
        def attempt() -> None:
            query = {"format": format, "with_trees": with_trees, "failed": failed_only}
            with self._transport.stream(self._path("/results"), **query) as response, path.open("wb") as file:
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    file.write(chunk)
                expected = int(response.headers.get("content-length", file.tell()))
                if file.tell() != expected:
                    raise ClientError(f"{file.tell()} of {expected} bytes came: try again")

        self._transport.again(attempt, is_repeatable=True)

    def _keep(self, response: httpx.Response) -> JobStatus:
        self.last_status = JobStatus.of(response.json())
        return self.last_status

    def _path(self, rest: str = "") -> str:
        return f"/v1/jobs/{self.id}{rest}"
