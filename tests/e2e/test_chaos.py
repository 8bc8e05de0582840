"""A short run of the chaos harness (`benchmarks.chaos`): real processes are killed, and every row is there once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 360.0
"""About 60 s where the processor is free."""


def run_chaos(*options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of one run."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--rows", "200", "--json", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-4000:]
    print(done.stderr)
    report: dict[str, Any] = json.loads(lines[-1])
    return done.returncode, report


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_whatever_is_killed_every_row_is_there_once(database: str) -> None:
    code, report = run_chaos("--faults", "5", "--seed", "6", "--database", database)
    for name in ("lost", "doubled", "wrong", "fenced_accepted"):
        assert report[name] == 0, report["violations"]
    for name in ("stalled", "left_over", "violations"):
        assert report[name] == []
    assert code == 0
    assert report["faults"] + report["faults_not_done"] == 5
    assert report["rows"] >= 200
    assert report["seams_hit"]


def test_the_harness_notices_writes_that_no_fence_held_back() -> None:
    """Without the fence, a worker that was stopped with results in its hands stores them into its successor's lease."""
    code, report = run_chaos(
        "--faults", "3", "--seed", "1", "--kind", "stop_at_failpoint:result_computed", "--sabotage", "fence"
    )
    assert report["fenced_accepted"] > 0
    assert code == 1
