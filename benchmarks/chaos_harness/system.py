"""The service under test: one FORQ_HOME, its processes, and what may be done to them from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_harness.plan import MODEL, folder_in
from benchmarks.chaos_harness.postgres import Postgres
from jobs import parts
from jobs.child import die_with_parent
from jobs.settings import Settings

UP_TIMEOUT_S = 180.0
DOWN_TIMEOUT_S = 120.0
REPOSITORY = Path(__file__).parents[2]


class System:
    """`forq up` as a child of the harness."""

    def __init__(self, settings: Settings, postgres: Postgres | None) -> None:
        self.settings = settings
        self.postgres = postgres
        self.gave_up: list[str] = []
        """Last lines of `up` processes that ended although nobody had killed them."""
        self._up: subprocess.Popen[bytes] | None = None
        self._log = settings.home / "logs" / "up.log"
        self._log_start = 0
        self._log.parent.mkdir(parents=True, exist_ok=True)
        (settings.home / "work").mkdir(exist_ok=True)

    def start(self) -> None:
        """Start `up`, if it does not run; it need not be ready."""
        if self._up is not None and self._up.poll() is None:
            return
        with self._log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._up = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos_harness.up_entry", "up", "--model", MODEL],
                cwd=self.settings.home / "work", env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def tend(self) -> None:
        """As an operator's init would: start `up` again when it has ended, and keep what it said."""
        if self._up is not None and self._up.poll() is not None:
            said = [line for line in self._said().splitlines() if line.strip()]
            self.gave_up.append(f"exit code {self._up.returncode}: {said[-1] if said else 'it said nothing'}")
            self._up = None
            self.start()

    def wait_up(self) -> None:
        deadline = time.monotonic() + UP_TIMEOUT_S
        while "forq is up:" not in self._said():
            if time.monotonic() > deadline:
                raise TimeoutError(f"forq is not up after {UP_TIMEOUT_S:.0f} s: {self._said()[-2000:]}")
            self.tend()
            time.sleep(0.1)

    def down(self) -> int | None:
        """Stop as Ctrl-C does. Returns the exit code, or None if it did not stop and was killed."""
        if self._up is None:
            return 0
        self._up.send_signal(signal.SIGINT)
        try:
            return self._up.wait(DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None

    def pids(self, role: str) -> list[int]:
        found = [part["pid"] for part in parts.running(self.settings) if part["role"] == role]
        return sorted(found)

    def kill_up(self, *, whole_tree: bool) -> None:
        """SIGKILL the supervisor, and with `whole_tree` everything below it before it can notice."""
        assert self._up is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._up.pid).children(recursive=True) if whole_tree else []
            self._up.kill()
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._up.wait()
        self._up = None

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self._up is not None:
            self._up.wait()
            self._up = None

    def processes(self) -> list[psutil.Process]:
        """Every living process of the service, however it came about: all of them work below FORQ_HOME."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                below = Path(process.cwd()).is_relative_to(self.settings.home)
                if below and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def broker(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=str(self.settings.broker_socket), socket_timeout=5)

    def api_answers(self) -> bool:
        url = f"http://127.0.0.1:{self.settings.api_port}/healthz"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    @property
    def folder(self) -> Path:
        return folder_in(self.settings.home)

    def _said(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")
