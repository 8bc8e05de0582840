"""Child processes that neither outlive their parent nor refuse to stop."""

import contextlib
import ctypes
import resource
import signal
import subprocess
import sys
from typing import Any

import psutil

STOP_TIMEOUT_S = 15.0


def die_with_parent() -> None:
    """Runs in the child before its program: have the kernel send SIGTERM when the parent dies, however it dies."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def leave_no_core() -> None:
    """Have no core dump written where this process crashes: it would hold prompts. `prlimit --core` allows it again."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def end(process: "subprocess.Popen[Any]", timeout_s: float) -> None:
    """Wait for a process that was told to stop; kill it and its children when it does not."""
    try:
        process.wait(timeout_s)
        return
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait(10)
