"""`forq api` as a process on a real port."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pyarrow as pa
from api_support import parquet_bytes

from jobs.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """The process, its address, and a client."""

    def __init__(
        self,
        settings: Settings,
        *options: str,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        environment = {
            **(environment or {}),
            **{key: value for key, value in os.environ.items() if not key.startswith("FORQ_")},
            "FORQ_HOME": str(settings.home),
            "FORQ_DATABASE_URL": settings.sqlalchemy_url,
            "FORQ_BROKER_URL": settings.celery_broker_url,
            "FORQ_LIMITS__MAX_UPLOAD_BYTES": str(32 << 20),
            "FORQ_QUEUE__SHARD_ROWS": "65536",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "api", "--host", host, "--port", str(self.port), *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=tls or True)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()[0].decode()
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def submit(self, table: pa.Table) -> str:
        response = self.http.post("/v1/jobs", files={"file": ("prompts.parquet", parquet_bytes(table))})
        assert response.status_code == 201, response.text
        return str(response.json()["job_id"])

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; returns the exit code and what was printed."""
        self.process.send_signal(signal.SIGTERM)
        output = self.process.communicate(timeout=30)[0].decode()
        return self.process.returncode, output


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
