"""moto's S3 server as a process on a real port: it can be killed, and asks for credentials where it is told to."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.storage_settings import StorageRoot, StorageSettings

BUCKET = "forq-tests"
KEY_ID, SECRET = "AKIAFORQTESTS", "a-secret-that-no-message-may-show"
"""Whatever is said is let in, unless `checks_credentials`."""


class S3Server:
    """The process, its address, and boto3's client of it."""

    def __init__(self, log: Path, *, checks_credentials: bool = False, port: int = 0) -> None:
        import boto3
        from botocore.config import Config

        # How many requests it takes before it looks at who asks: those that set it up.
        environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "6" if checks_credentials else "1000000000"}
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        self.port = self._wait_for_port(log)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            config=Config(retries={"max_attempts": 1}),
        )
        self.client.create_bucket(Bucket=BUCKET)

    def _wait_for_port(self, log: Path) -> int:
        deadline = time.monotonic() + 60
        while (match := re.search(rb"Running on http://127\.0\.0\.1:(\d+)", log.read_bytes())) is None:
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "moto does not start"
            time.sleep(0.05)
        return int(match[1])

    def put(self, key: str, body: bytes) -> str:
        """Returns the URL."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=body)
        return self.url_of(key)

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body

    def url_of(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def list_keys(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [item["Key"] for item in found]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


def storage_at(endpoint: str, **values: float) -> StorageSettings:
    """Settings that allow inputs under `in/` and outputs under `out/`."""
    roots = (
        StorageRoot(url=f"s3://{BUCKET}/in/", write=False, endpoint_override=endpoint),
        StorageRoot(url=f"s3://{BUCKET}/out/", endpoint_override=endpoint),
        StorageRoot(url="s3://no-such-bucket/", endpoint_override=endpoint),
    )
    return StorageSettings.model_validate({"roots": roots, "max_attempts": 2, **values})


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's, and none of the machine's own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
