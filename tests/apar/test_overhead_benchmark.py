"""`python -m benchmarks.scheduler_overhead`, small: its figures are there and mean what they say."""

import json

from click.testing import CliRunner

from benchmarks.scheduler_overhead import main


def test_every_side_is_measured() -> None:
    done = CliRunner().invoke(main, ["--threads", "16", "--steps", "5", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["threads"], found["width"]) == (16, 4)
    assert min(found["stock_ms"], found["unforked_ms"], found["forked_ms"]) > 0
    assert 0 < found["pressed_rows"] < 64
    assert found["pressed_waiting"] > 1
    assert found["pressed_overhead_ms"] > 0
