"""`forq api` as a process on a real port: long polls, slow and vanishing clients, shutdown, TLS, the command itself."""

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
import trustme
from api_support import assert_problem, finish_shard, prompts
from click.testing import CliRunner
from server_process import ROOT, Server, until

from api import cli
from db.session import Database
from jobs import keys, parts
from jobs.api_settings import ApiSettings
from jobs.errors import BadInput
from jobs.settings import Settings, get_settings
from jobs.supervisor import Part, Supervisor

NUM_WAITERS = 60  # more than the server has threads


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
def authority() -> trustme.CA:
    return trustme.CA()


def test_on_an_address_that_others_reach_it_speaks_tls_and_asks_for_keys(
    settings: Settings, database: Database, tmp_path: Path, authority: trustme.CA
) -> None:
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(tmp_path / "chain.pem", append=True)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    described, key = keys.create(database, "k", ["submit", "read"], tenant="a")
    files = ["--ssl-certfile", str(tmp_path / "chain.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    server = Server(settings, *files, host="0.0.0.0", tls=trust)
    try:
        until(server.is_up)
        assert_problem(server.http.get("/v1/jobs"), 401, "API key")
        server.http.headers["Authorization"] = f"Bearer {key}"
        job_id = server.submit(prompts())
        assert server.http.get("/v1/jobs").json()["jobs"][0]["job_id"] == job_id
        api = ApiSettings(ssl_certfile=tmp_path / "chain.pem")
        outer = settings.model_copy(update={"api_host": "0.0.0.0", "api_port": server.port, "api": api})
        part = Part("api", [], lambda part: True, process=server.process)
        assert Supervisor(outer, "m", database)._api_ready(part)  # what `forq up` waits for
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/healthz")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            httpx.get(f"{server.url}/healthz")
        code, output = server.terminate()
    finally:
        server.http.close()
        server.process.kill()
        server.process.communicate()
    assert code == 0, output
    assert key[-43:] not in output
    assert f'"key": "{described["id"]}"' in output  # who did it is logged
    assert "api_without_tls" not in output


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """Where the command would have served."""
    addresses: list[tuple[str, int]] = []
    monkeypatch.setenv("FORQ_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "serve", lambda settings, host, port, **_: addresses.append((host, port)))
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
    for text in (repr(host), "--insecure-bind", "forq keys create"):
        assert text in message
    assert served == []


def test_an_address_that_others_reach_is_served_when_the_operator_insists(served: list[tuple[str, int]]) -> None:
    assert CliRunner().invoke(cli.api, ["--host", "0.0.0.0", "--port", "9", "--insecure-bind"]).exit_code == 0
    assert served == [("0.0.0.0", 9)]


def test_a_certificate_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "empty.pem").touch()
    for options in (["--ssl-certfile", "empty.pem"], ["--ssl-certfile", "none.pem", "--ssl-keyfile", "empty.pem"]):
        command = [
            sys.executable,
            "-m",
            "jobs.cli",
            "api",
            *[name if name[0] == "-" else str(tmp_path / name) for name in options],
        ]
        environment = {**os.environ, "FORQ_HOME": str(settings.home), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"forq: {tmp_path}")
        assert len(done.stderr.splitlines()) == 1


def test_a_private_key_alone_is_refused(served: list[tuple[str, int]]) -> None:
    with pytest.raises(BadInput, match="--ssl-certfile"):
        CliRunner().invoke(cli.api, ["--ssl-keyfile", "k.pem"], catch_exceptions=False)
    assert served == []


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
