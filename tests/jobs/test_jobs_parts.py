"""What a running part leaves in FORQ_HOME, and where it crashes."""

import resource
import subprocess
import sys

from jobs import parts
from jobs.settings import Settings

PART = """
import resource, sys
from pathlib import Path
from jobs import parts
from jobs.settings import Settings
with parts.registered(Settings(home=Path(sys.argv[1])), "worker"):
    print(*resource.getrlimit(resource.RLIMIT_CORE), flush=True)
    sys.stdin.readline()
"""


def test_a_part_is_told_of_while_it_runs_and_dumps_no_core(settings: Settings) -> None:
    command = [sys.executable, "-c", PART, str(settings.home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as part:
        assert part.stdout is not None
        soft, hard = part.stdout.readline().split()
        (found,) = parts.running(settings)
        assert (found["role"], found["pid"]) == ("worker", part.pid)
        part.communicate("\n", timeout=60)
    assert soft == "0"
    assert int(hard) == resource.getrlimit(resource.RLIMIT_CORE)[1], "whoever looks for a crash may allow it again"
    assert parts.running(settings) == []
