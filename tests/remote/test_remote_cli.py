"""The command line with URLs: submit from S3, answers as a worker writes them, export to S3."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import BUCKET, SECRET, S3Server

from db.session import Database
from jobs import leases, results
from jobs.settings import DEFAULT_MODEL, Settings

STATS = results.Stats(1, 0, 1, 3, 8, 1, 21, 8, 21, 0)


class Forq:
    """Commands as processes of their own, in a folder whose forq.toml allows the server's folders."""

    def __init__(self, folder: Path, s3: S3Server) -> None:
        self.folder = folder
        self.settings = Settings(home=folder / "home")
        (folder / "forq.toml").write_text(
            "[storage]\nroots = [\n"
            f'  {{url = "s3://{BUCKET}/in", endpoint_override = "{s3.url}", write = false}},\n'
            f'  {{url = "s3://{BUCKET}/out", endpoint_override = "{s3.url}"}},\n'
            f'  "file://{folder}/files",\n'
            "]\n"
        )

    def __call__(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORQ_")},
            "FORQ_HOME": str(self.settings.home),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        command = [sys.executable, "-m", "jobs.cli", *args]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def submit(self, *args: str) -> str:
        job_id: str = json.loads(self("submit", *args, "--json").stdout)["job_id"]
        return job_id

    def answer(self) -> None:
        """Answer the next shard as a worker does."""
        database = Database(self.settings.sqlalchemy_url)
        lease = leases.acquire(database, DEFAULT_MODEL, "0" * 26, 60.0)
        assert lease is not None
        sample = results.SampleResult("an answer", "stop", 5, 3, STATS, ())
        rows = results.load(database, lease).rows
        results.write(database, lease, [results.RowResult(row.request_id, (sample,)) for row in rows])
        leases.finish(database, lease)
        database.dispose()


@pytest.fixture
def forq(tmp_path: Path, s3: S3Server) -> Forq:
    return Forq(tmp_path, s3)


def parquet(values: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(values), sink)
    return sink.getvalue()


def test_a_job_goes_from_s3_to_s3(forq: Forq, s3: S3Server) -> None:
    url = s3.put("in/prompts.parquet", parquet({"prompt": ["one", "two"], "n": [1, 2]}))
    job_id = forq.submit(url)
    forq.answer()
    out = f"s3://{BUCKET}/out/cli/answers.parquet"
    done = forq("export", job_id, out)
    assert done.stdout == f"2 rows in {out}\n"
    assert "uploading: " in done.stderr
    table = pq.read_table(io.BytesIO(s3.get("out/cli/answers.parquet")))
    assert table.select(["prompt", "n", "forq_output"]).to_pydict() == {
        "prompt": ["one", "two"], "n": [1, 2], "forq_output": ["an answer", "an answer"],
    }  # fmt: skip
    done = forq("export", job_id, f"s3://{BUCKET}/out/cli/answers.jsonl", "--json")
    assert json.loads(done.stdout) == {"job_id": job_id, "file": f"s3://{BUCKET}/out/cli/answers.jsonl", "rows": 2}
    assert [json.loads(line)["prompt"] for line in s3.get("out/cli/answers.jsonl").splitlines()] == ["one", "two"]


def test_a_job_goes_from_file_to_file(forq: Forq) -> None:
    files = forq.folder / "files"
    files.mkdir()
    (files / "prompts.parquet").write_bytes(parquet({"prompt": ["one"]}))
    job_id = forq.submit(f"file://{files}/prompts.parquet")
    forq("export", job_id, f"file://{files}/answers.parquet")
    assert pq.read_table(files / "answers.parquet")["prompt"].to_pylist() == ["one"]
    assert sorted(path.name for path in files.iterdir()) == ["answers.parquet", "prompts.parquet"]


def test_paths_need_no_root_and_urls_do(forq: Forq) -> None:
    path = forq.folder / "prompts.parquet"
    path.write_bytes(parquet({"prompt": ["one"]}))
    job_id = forq.submit(str(path))
    forq("export", job_id, str(forq.folder / "answers.parquet"))
    refusal = forq("submit", f"file://{path}", code=2)
    assert refusal.stderr.startswith(f"forq: file://{path} is under none of the roots")
    refusal = forq("export", job_id, f"file://{forq.folder}/elsewhere.parquet", code=2)
    assert "under none of the roots" in refusal.stderr
    assert refusal.stderr.count("\n") == 1


def test_a_refused_url_is_one_line_and_exit_code_2(forq: Forq, s3: S3Server) -> None:
    for url, says in [
        (f"s3://{BUCKET}/in/../out/a.parquet", "'..' part"),
        ("https://example.com/a.parquet", "is no URL that forq opens"),
        (f"s3://{BUCKET}/in/none.parquet", "no such object"),
    ]:
        refusal = forq("submit", url, code=2)
        assert says in refusal.stderr
        assert refusal.stderr.count("\n") == 1
    assert forq("list", "--json").stdout == "[]\n"
