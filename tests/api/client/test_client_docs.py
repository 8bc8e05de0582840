"""The page of the Python client: its examples run, in order, against the real server process."""

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from api_support import finish_shard
from server_process import ROOT, Server

from db.session import Database

PAGE = ROOT / "docs" / "python-client.md"


@pytest.fixture
def _worker(database: Database) -> Iterator[None]:
    """Answers shards as they come; the first row of the first two jobs fails, so that there is something to retry."""
    stop = threading.Event()

    def work() -> None:
        failures: list[tuple[int, ...]] = [(0,), (0,)]
        while not stop.wait(0.1):
            with suppress(AssertionError):  # nothing waits
                finish_shard(database, failing=failures[0] if failures else ())
                failures = failures[1:]

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("_worker")
def test_the_examples_run_as_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) >= 6
    namespace: dict[str, object] = {}
    for example in examples:
        exec(compile(example.replace("http://127.0.0.1:8765", server.url), str(PAGE), "exec"), namespace)
    out = capsys.readouterr().out
    assert "completed 1 of 2" in out
    assert "has no column 'promt'" in out
    assert "1 rows run again" in out
    assert (tmp_path / "answers.jsonl").read_text().count('"forq_output": "an answer"') == 1


def test_the_page_names_every_error_and_option() -> None:
    import jobs.client
    from jobs.client import SubmitOptions

    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {name for name in jobs.client.__all__ if name.endswith("Error")} <= named
    assert set(SubmitOptions.__annotations__) <= named
