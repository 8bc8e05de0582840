"""The Python examples of docs/openai-batches.md run as they are written, against a server."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from api_support import finish_shard
from openai_support import answering
from server_process import Server, until

from db.session import Database
from jobs import keys
from jobs.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai-batches.md"
URL = "http://127.0.0.1:8765"


@pytest.mark.usefixtures("capsys")
def test_the_examples_of_the_page_run(settings: Settings, database: Database) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    life, forking, parquet, cancel, with_key = examples
    server = Server(settings)
    until(server.is_up)
    names: dict[str, object] = {}

    def run(example: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(example.replace(URL, server.url), names)
        return printed.getvalue()

    try:
        with answering(database):
            printed = run(life)
        assert printed.splitlines()[0].startswith("completed")
        assert printed.splitlines()[1:] == ["question-0 an answer", "question-1 an answer"]
        run(forking)
        run(parquet)
        run(cancel)
        assert names["batch"].status in ("cancelling", "cancelled")  # type: ignore[attr-defined]
        with pytest.raises(AssertionError):
            finish_shard(database)  # nothing of it is left to do
        key = keys.create(database, "k", ("submit", "read"))[1]
        run(with_key.replace("forq_...", key) + "client.files.list()\n")
    finally:
        server.terminate()
