"""A server that speaks Google's JSON API, as a process on a port of its own; its client is plain HTTP, not pyarrow."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from jobs.storage_settings import StorageRoot, StorageSettings

BUCKET = "forq-tests"
# By itself it answers one request at a time: an object's metadata not while its content is read.
_START = (
    "from http import server; server.HTTPServer = server.ThreadingHTTPServer; "
    "from gcp_storage_emulator.__main__ import main; main()"
)


class GcsServer:
    """The process, its address, and objects as it has them."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("wb")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["start", "--host=127.0.0.1", f"--port={self.port}", "--in-memory", f"--default-bucket={BUCKET}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments], stdout=self._log, stderr=subprocess.STDOUT
        )
        self._client = httpx.Client(base_url=self.url, timeout=30)
        self._wait()

    @retry(stop=stop_after_delay(60), wait=wait_fixed(0.1), retry=retry_if_exception_type(httpx.TransportError))
    def _wait(self) -> None:
        self._client.get(f"/storage/v1/b/{BUCKET}").raise_for_status()

    def put(self, key: str, body: bytes) -> str:
        """Returns the URL."""
        where = f"/upload/storage/v1/b/{BUCKET}/o"
        query = {"uploadType": "media", "name": key}
        kind = {"Content-Type": "application/octet-stream"}
        self._client.post(where, params=query, content=body, headers=kind).raise_for_status()
        return self.url_of(key)

    def url_of(self, key: str) -> str:
        return f"gs://{BUCKET}/{key}"

    def get(self, key: str) -> bytes | None:
        """None: there is no such object."""
        answer = self._client.get(self._path(key), params={"alt": "media"})
        return None if answer.status_code == 404 else answer.raise_for_status().content

    def delete(self, key: str) -> None:
        self._client.delete(self._path(key)).raise_for_status()

    def _path(self, key: str) -> str:
        return f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self._client.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


def gcs_storage(endpoint: str) -> StorageSettings:
    """Settings that allow inputs under `in/` and outputs under `out/`."""
    roots = (
        StorageRoot(url=f"gs://{BUCKET}/in/", write=False, endpoint_override=endpoint, anonymous=True),
        StorageRoot(url=f"gs://{BUCKET}/out/", endpoint_override=endpoint, anonymous=True),
        StorageRoot(url="gs://no-such-bucket/", endpoint_override=endpoint, anonymous=True),
    )
    return StorageSettings.model_validate({"roots": roots, "request_timeout_s": 2})
