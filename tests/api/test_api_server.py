"""`forq api` as a process on a real port: long polls, slow and vanishing clients, shutdown, the command itself."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from api_support import assert_problem, finish_shard, parquet_bytes, prompts
from click.testing import CliRunner

from api import cli
from db.session import Database
from jobs import parts
from jobs.errors import BadInput
from jobs.settings import Settings, get_settings

ROOT = Path(__file__).resolve().parents[2]
NUM_WAITERS = 60  # more than the server has threads


class Server:
    """The process, its address, and a client."""

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FORQ_")},
            "FORQ_HOME": str(settings.home),
            "FORQ_DATABASE_URL": settings.sqlalchemy_url,
            "FORQ_BROKER_URL": settings.celery_broker_url,
            "FORQ_LIMITS__MAX_UPLOAD_BYTES": str(32 << 20),
            "FORQ_QUEUE__SHARD_ROWS": "65536",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "api", "--port", str(self.port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

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


@pytest.fixture
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    try:
        until(server.is_up)
        yield server
    finally:
        server.http.close()
        server.process.kill()
        server.process.communicate()


def open_scratch_files(server: Server, settings: Settings) -> list[str]:
    """Files of the scratch folder, with or without a name, that the server or the disk still holds."""
    links = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    folder = settings.home / "tmp"
    return [link for link in links if link.startswith(str(folder))] + [str(path) for path in folder.iterdir()]


def test_a_long_poll_wakes_when_the_job_moves(server: Server, database: Database) -> None:
    path = f"/v1/jobs/{server.submit(prompts())}"
    etag = server.http.get(path).headers["etag"]
    with ThreadPoolExecutor(2) as pool:
        news = pool.submit(httpx.get, f"{server.url}{path}?wait=30", headers={"If-None-Match": etag}, timeout=60)
        end = pool.submit(httpx.get, f"{server.url}{path}?wait=30", timeout=60)
        time.sleep(0.7)  # the polls must have begun; were they late, the test would still pass, for less
        assert not news.done()
        assert not end.done()
        began = time.monotonic()
        finish_shard(database)
        responses = [news.result(), end.result()]
    assert time.monotonic() - began < 5
    assert [response.status_code for response in responses] == [200, 200]
    assert responses[1].json()["state"] == "completed"
    assert responses[0].headers["etag"] != etag


def test_a_long_poll_without_news_ends_with_304_or_the_status(server: Server) -> None:
    path = f"/v1/jobs/{server.submit(prompts())}?wait=0.6"
    began = time.monotonic()
    response = server.http.get(path)
    assert response.json()["state"] == "queued"
    assert server.http.get(path, headers={"If-None-Match": response.headers["etag"]}).status_code == 304
    assert 1.2 <= time.monotonic() - began < 5


def test_many_long_polls_hold_up_nobody_and_end_at_shutdown(server: Server) -> None:
    path = f"/v1/jobs/{server.submit(prompts())}"
    etag = server.http.get(path).headers["etag"]

    def poll(number: int) -> int:
        headers = {"If-None-Match": etag} if number % 2 else {}
        return httpx.get(f"{server.url}{path}?wait=60", headers=headers, timeout=90).status_code

    with ThreadPoolExecutor(NUM_WAITERS) as pool:
        polls = [pool.submit(poll, number) for number in range(NUM_WAITERS)]
        time.sleep(1.0)
        assert not any(poll.done() for poll in polls)
        began = time.monotonic()
        assert server.http.get("/v1/jobs").status_code == 200
        assert server.http.get("/readyz").status_code == 200
        assert time.monotonic() - began < 3
        began = time.monotonic()
        code, output = server.terminate()
        assert time.monotonic() - began < 10
        assert {poll.result() for poll in polls} == {200, 304}
    assert code == 0, output
    assert "Traceback" not in output


def big_table() -> pa.Table:
    return pa.table({"prompt": [secrets.token_hex(500) for _ in range(12_000)]})


def test_a_slow_client_holds_up_nobody_and_leaves_nothing_when_it_goes(server: Server, settings: Settings) -> None:
    job_id = server.submit(big_table())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(f"GET /v1/jobs/{job_id}/results?format=jsonl HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        held = open_scratch_files(server, settings)
        assert len(held) == 1
        assert held[0].endswith("(deleted)")
        assert server.http.get(f"/v1/jobs/{job_id}").status_code == 200
        whole = server.http.get(f"/v1/jobs/{job_id}/results?format=jsonl")
        assert whole.text.count("\n") == 12_000
    until(lambda: open_scratch_files(server, settings) == [])


def test_a_client_that_leaves_during_an_upload_leaves_nothing(server: Server, settings: Settings) -> None:
    head = (
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Content-Length: 9000000\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="a.parquet"\r\n\r\n'
    )
    with socket.socket() as leaving:
        leaving.connect(("127.0.0.1", server.port))
        leaving.sendall(head.encode() + b"x" * (3 << 20))
        until(lambda: open_scratch_files(server, settings) != [])
    until(lambda: open_scratch_files(server, settings) == [])
    assert server.http.get("/v1/jobs").json()["jobs"] == []
    code, output = server.terminate()
    assert code == 0
    assert "request_crashed" not in output


def test_an_endless_upload_is_cut_at_the_limit_and_told_so(server: Server, settings: Settings) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.parquet"\r\n\r\n'

    def chunks() -> Iterator[bytes]:
        yield head
        for _ in range(40):
            yield b"x" * (1 << 20)

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert_problem(server.http.post("/v1/jobs", content=chunks(), headers=headers), 413, str(32 << 20))
    assert open_scratch_files(server, settings) == []


def test_the_process_is_listed_among_the_parts_while_it_runs(server: Server, settings: Settings) -> None:
    part = parts.find(settings, "api")
    assert part is not None
    assert (part["pid"], part["port"]) == (server.process.pid, server.port)
    assert server.terminate()[0] == 0
    assert parts.find(settings, "api") is None


def test_a_port_in_use_ends_the_command_with_a_reason(server: Server, settings: Settings) -> None:
    environment = {**os.environ, "FORQ_HOME": str(settings.home)}
    command = [sys.executable, "-m", "jobs.cli", "api", "--port", str(server.port)]
    second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1].startswith(f"forq: 127.0.0.1 port {server.port} cannot be bound")
    assert "in use" in second.stderr


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """Where the command would have served."""
    addresses: list[tuple[str, int]] = []
    monkeypatch.setenv("FORQ_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "serve", lambda settings, host, port, *, any_host: addresses.append((host, port)))
    get_settings.cache_clear()
    yield addresses
    get_settings.cache_clear()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_an_address_that_others_reach_is_refused_in_one_line(served: list[tuple[str, int]], host: str) -> None:
    with pytest.raises(BadInput) as refusal:
        CliRunner().invoke(cli.api, ["--host", host], catch_exceptions=False)
    message = str(refusal.value)
    assert refusal.value.exit_code == 2
    assert len(message.splitlines()) == 1
    assert repr(host) in message
    assert "--insecure-bind" in message
    assert served == []


def test_an_address_that_others_reach_is_served_when_the_operator_insists(served: list[tuple[str, int]]) -> None:
    assert CliRunner().invoke(cli.api, ["--host", "0.0.0.0", "--port", "9", "--insecure-bind"]).exit_code == 0
    assert served == [("0.0.0.0", 9)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_is_served(served: list[tuple[str, int]], host: str) -> None:
    assert CliRunner().invoke(cli.api, ["--host", host]).exit_code == 0
    assert served == [(host, 8765)]


def test_the_settings_name_the_address_unless_the_command_does(
    served: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORQ_API_HOST", "::1")
    monkeypatch.setenv("FORQ_API_PORT", "1234")
    assert CliRunner().invoke(cli.api, []).exit_code == 0
    assert CliRunner().invoke(cli.api, ["--port", "99"]).exit_code == 0
    assert served == [("::1", 1234), ("::1", 99)]


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(cli.api, ["--help"])
    assert "Example:\n    forq api --port 8765\n" in result.output
