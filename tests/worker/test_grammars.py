"""The process that compiles grammars: it answers within limits, and after whatever ends it comes another."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.sampling import Structured
from worker.grammars import GrammarChecker

pytestmark = pytest.mark.timeout(900)

VOCABULARY = 49152
SLOW = Structured(regex="(a|a)*" * 600)
GOOD = Structured(choice=["yes", "no"])


@pytest.fixture(scope="module")
def checker(smollm2_path: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(str(smollm2_path), VOCABULARY, compile_s=2)
    yield checker
    checker.close()


def test_a_good_grammar_has_no_fault_and_a_bad_one_says_why(checker: GrammarChecker) -> None:
    assert checker.fault(GOOD) is None
    assert checker.fault(Structured(regex="[0-9]+")) is None
    assert checker.fault(Structured(json_schema={"type": "object"})) is None
    fault = checker.fault(Structured(regex="("))
    assert fault is not None
    assert fault.startswith("structured.regex cannot be compiled: ")
    assert "\n" not in fault
    assert ".cc" not in fault


def test_one_that_takes_too_long_ends_the_child_and_the_next_one_is_answered(checker: GrammarChecker) -> None:
    assert checker.fault(SLOW) == "structured.regex takes longer than 2 s to compile: write a simpler one"
    assert checker.fault(Structured(choice=["after"])) is None


def test_a_job_whose_grammars_end_the_child_again_and_again_may_bring_no_other(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.grammars.MOST_BROKEN", 1)
    slow, new = Structured(regex="(a|b)*" * 600), Structured(choice=["of", "two", "jobs"])
    assert checker.fault(slow, "its") == "structured.regex takes longer than 2 s to compile: write a simpler one"
    said = checker.fault(new, "its")
    assert said is not None
    assert said.startswith("structured.choice is not compiled: 1 grammars of this job went over the limits")
    assert checker.fault(new, "another's") is None
    assert checker.fault(new, "its") is None, "it is known by now"


def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    checker.fault(GOOD)
    checker.close()
    assert checker.fault(GOOD) is None
    assert checker._child is None, "nothing was asked"


@pytest.mark.skipif(sys.platform != "linux", reason="address spaces are limited on Linux only")
def test_the_child_cannot_take_more_memory_than_it_is_given(smollm2_path: Path) -> None:
    checker = GrammarChecker(str(smollm2_path), VOCABULARY, memory_bytes=256 << 20)
    assert checker.fault(GOOD) is None
    assert checker._child is not None
    process = psutil.Process(checker._child.pid)
    (limit, _), used = process.rlimit(psutil.RLIMIT_AS), process.memory_info().vms
    checker.close()
    assert used < limit <= used + (256 << 20)


def test_a_child_that_is_killed_or_idle_is_followed_by_another(smollm2_path: Path) -> None:
    checker = GrammarChecker(str(smollm2_path), VOCABULARY, idle_s=0.01)
    assert checker.fault(Structured(choice=["first"])) is None
    child = checker._child
    assert child is not None
    assert child.wait(60) == 0, "with nothing to do it ends"
    assert checker.fault(Structured(choice=["second"])) is None
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    assert checker.fault(Structured(choice=["third"])) is None
    checker.close()


def test_one_that_cannot_be_started_is_said_to_be_so_and_nothing_is_remembered(tmp_path: Path) -> None:
    checker = GrammarChecker(str(tmp_path / "nowhere"), VOCABULARY)
    began_at = time.monotonic()
    fault = checker.fault(GOOD)
    assert fault == "structured.choice cannot be checked: the process that compiles grammars does not start"
    assert time.monotonic() - began_at < 250, "it does not wait for a child that has ended"
    assert not checker._known
