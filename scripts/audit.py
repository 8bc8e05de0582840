"""Asks whether a locked version has a known vulnerability.

    python -m scripts.audit                    # `make audit`: every pin of requirements/*.lock, at osv.dev
    python -m scripts.audit --service pypi     # at PyPI, where osv.dev cannot be reached

pip-audit asks; nothing is resolved or installed, for the locks are complete. Exit codes: 0, nothing is known, or the
service cannot be reached, which is said; 1, something is known; 2, a line of a lock cannot be read, or pip-audit fails.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
REQUEST_TIMEOUT_S = 15
TIMEOUT_S = 900.0
_UNREACHABLE = re.compile(r"requests\.exceptions\.\w+|Could not connect to .*|\bServiceError|\bConnectionError")

Pin = tuple[str, str]
"""Canonical name and version, without its local part: `+cpu` is a build of the version that advisories name."""


class Unreadable(Exception):
    """A line that pins nothing, which therefore nobody would check."""


class NotChecked(Exception):
    """The advisory service gave no answer."""


class Failed(Exception):
    """pip-audit could not do its work."""


def pins(locks: Iterable[Path]) -> dict[Pin, list[str]]:
    """Every pin, and the locks that have it; markers are left out: another platform's package counts, too.

    Raises:
        Unreadable: a line is not `name==version`.
    """
    found: dict[Pin, list[str]] = defaultdict(list)
    for lock in locks:
        for number, line in enumerate(lock.read_text().splitlines(), start=1):
            text = line.partition(" #")[0].strip()
            if not text or text.startswith("#"):
                continue
            try:
                requirement = Requirement(text)
                (specifier,) = requirement.specifier
                version = Version(specifier.version).public
                if specifier.operator != "==":
                    raise ValueError(specifier.operator)
            except ValueError:  # InvalidRequirement and InvalidVersion are such
                raise Unreadable(f"{lock.name} line {number} is {text!r}: a lock has name==version") from None
            found[canonicalize_name(requirement.name), version].append(lock.name)
    return dict(found)


def audit(wanted: Iterable[Pin], options: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """What pip-audit says of each pin: its `name`, `version` and `vulns`, or a `skip_reason`.

    Raises:
        NotChecked: the service cannot be reached, or is not done in time.
        Failed: anything else.
    """
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout_s
    for layer in _layers(wanted):
        with TemporaryDirectory() as folder:
            requirements, output = Path(folder, "requirements.txt"), Path(folder, "answer.json")
            requirements.write_text("".join(f"{name}=={version}\n" for name, version in layer))
            command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
            command += ["--format", "json", "--timeout", str(REQUEST_TIMEOUT_S), *options]
            command += ["--requirement", str(requirements), "--output", str(output)]
            try:
                left_s = max(0.0, deadline - time.monotonic())
                done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
            except subprocess.TimeoutExpired:
                raise NotChecked(f"it has not answered within {timeout_s:g} s") from None
            if not output.exists():
                raise _why(done.stderr)
            answers += json.loads(output.read_text())["dependencies"]
    return answers


def _layers(wanted: Iterable[Pin]) -> list[list[Pin]]:
    """pip-audit takes one version of a name at a time; locks for CPU and GPU may have two."""
    layers: list[list[Pin]] = []
    taken: dict[str, int] = defaultdict(int)
    for name, version in sorted(wanted):
        if taken[name] == len(layers):
            layers.append([])
        layers[taken[name]].append((name, version))
        taken[name] += 1
    return layers


def _why(stderr: str) -> NotChecked | Failed:
    found = _UNREACHABLE.search(stderr)
    if found is not None:
        return NotChecked(f"the advisory service cannot be reached ({found[0].removeprefix('requests.exceptions.')})")
    lines = [line for line in stderr.splitlines() if line.strip()]
    return Failed(f"pip-audit failed: {lines[-1] if lines else 'it said nothing'}")


def _finding(answer: dict[str, Any], vulnerability: dict[str, Any], locks: list[str]) -> str:
    aliases = f" ({', '.join(vulnerability['aliases'])})" if vulnerability["aliases"] else ""
    fixed = f"fixed in {', '.join(vulnerability['fix_versions'])}" if vulnerability["fix_versions"] else "no fix yet"
    return f"{answer['name']} {answer['version']} ({', '.join(locks)}): {vulnerability['id']}{aliases}, {fixed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", choices=["osv", "pypi"], default="osv")
    parser.add_argument("--osv-url", help="where osv.dev's interface is instead")
    parser.add_argument("--locks", type=Path, default=LOCKS, help="folder of *.lock files")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="for all of it; default %(default)s"
    )
    chosen = parser.parse_args(arguments)
    options = ["--vulnerability-service", chosen.service]
    if chosen.osv_url is not None:
        options += ["--osv-url", chosen.osv_url]
    try:
        wanted = pins(sorted(chosen.locks.glob("*.lock")))
        answers = audit(wanted, options, chosen.timeout)
    except NotChecked as error:
        print(f"not checked: {error}")
        return 0
    except (Unreadable, Failed) as error:
        print(f"not checked: {error}", file=sys.stderr)
        return 2
    findings = [
        _finding(answer, vulnerability, wanted[answer["name"], answer["version"]])
        for answer in answers
        for vulnerability in answer.get("vulns", [])
    ]
    unknown = [answer["name"] for answer in answers if "skip_reason" in answer]
    if unknown:
        print(f"not checked, as the service does not know them: {', '.join(unknown)}")
    checked = f"{len(answers) - len(unknown)} of {len(answers)} pinned versions checked"
    print("\n".join([*findings, f"{checked}, {len(findings) or 'no'} known vulnerabilities"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
