"""docs/synthetic-data.md runs as it is written: every block, in order, in one folder, on the real service."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1800)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "synthetic-data.md"
PATIENCE_S = 900.0


def blocks() -> list[tuple[str, str]]:
    """(language, text) of the page's code blocks."""
    found, inside = [], None
    for line in PAGE.read_text().splitlines():
        if line.startswith("```"):
            inside = None if inside is not None else (line[3:].strip(), [])
            if inside is not None:
                found.append(inside)
        elif inside is not None:
            inside[1].append(line)
    return [(language, "\n".join(lines) + "\n") for language, lines in found]


def test_the_page_runs_from_its_first_block_to_its_last(service: Service) -> None:
    binaries = service.home / "bin"
    binaries.mkdir()
    for name, command in {"forq": "-m jobs.cli", "python": ""}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (binaries / name).chmod(0o755)
    script = ["set -e"]
    for number, (language, text) in enumerate(blocks()):
        first, _, rest = text.partition("\n")
        if language in ("jinja", "toml"):  # the first line names the file
            name = first.strip("{}# ")
            (service.work / name).write_text(text if language == "toml" else rest.rstrip("\n"))
        elif language == "python":
            (service.work / f"block{number}.py").write_text(text)
            script.append(f"python block{number}.py")
        elif language == "sh":
            script.append(text)
    root = Path(__file__).resolve().parents[2]
    environment = {
        **service.environment,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(root),
        "HF_HOME": str(service.home / "hf"),
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        ["sh", "-c", "\n".join(script)], cwd=service.work, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert done.stdout.count("answers\t24") == 5, "every export counts what became of the 24 answers"
    assert pq.read_table(service.work / "everything.parquet").num_rows == 24
    names = {path.name for path in (service.work / "facts").iterdir()}
    assert names == {"train.parquet", "test.parquet"}
