"""The Python client against the real server process; answers are written as a worker writes them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_support import MODEL, UNKNOWN_JOB, batch_lines, finish_shard, prompts
from database_fixtures import Templates
from flaky_proxy import FlakyProxy, busy, cut_the_answer, lose_the_answer
from server_process import Server, until
from sqlalchemy import func, select

from db.models import Job as JobRow
from db.models import Shard
from db.session import Database
from jobs import keys
from jobs.client import (
    Client,
    ConflictError,
    JobStatus,
    NotAllowedError,
    NotFoundError,
    RefusedError,
    ServiceError,
    StillRunningError,
    TooManyError,
    UnreachableError,
)
from jobs.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def settings_in(home: Path, broker_url: str, templates: Templates) -> Settings:
    home.mkdir()
    (home.parent / "files").mkdir()
    (home / "forq.toml").write_text(f'[storage]\nroots = ["file://{home.parent}/files"]\n')
    return Settings(home=home, database_url=templates.copy("sqlite", home), broker_url=broker_url)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, broker_url: str, templates: Templates) -> Settings:
    """Of all tests that can share a service: none may leave a shard that another test would answer in its place."""
    return settings_in(tmp_path_factory.mktemp("service") / "home", broker_url, templates)


@pytest.fixture(scope="module")
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sqlalchemy_url)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    until(server.is_up, 60)
    yield server
    server.terminate()


@pytest.fixture
def files(settings: Settings) -> Path:
    """The folder that the service may read and write."""
    return settings.home.parent / "files"


@pytest.fixture(autouse=True)
def _no_shard_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "database" in request.fixturenames or "client" in request.fixturenames:
        database: Database = request.getfixturevalue("database")
        with database.read() as connection:
            waiting = connection.scalars(select(Shard.id).where(Shard.state == "queued")).all()
        for _ in waiting:
            finish_shard(database)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=120, retry_for_s=20) as client:
        yield client


@pytest.fixture
def proxy(server: Server) -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(server.port)
    yield proxy
    proxy.close()


def num_jobs(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(JobRow)).scalar_one()


def test_a_table_is_submitted_waited_for_and_read_back(client: Client, database: Database) -> None:
    job = client.submit(prompts(), prompt_column="prompt", max_tokens=16, temperature=0.5, name="a table", priority=-2)
    assert (job.last_status.state, job.last_status.counts.total) == ("queued", 3)
    assert job.last_status.name == "a table"
    worker = threading.Thread(target=finish_shard, args=(database,), kwargs={"failing": (1,)})
    worker.start()
    status = job.wait(timeout=30)
    worker.join()
    assert (status.state, status.counts.completed, status.counts.failed) == ("completed", 2, 1)
    assert status.finished_at is not None
    assert status.finished_at.tzinfo is not None
    table = job.to_table()
    assert table.select(["prompt", "key"]).equals(prompts())
    assert table["forq_output"].to_pylist() == ["an answer", None, "an answer"]
    assert "forq_tree" in job.to_table(with_trees=True).column_names
    assert job.to_table(failed_only=True)["key"].to_pylist() == [1]
    assert job.stats()["num_samples"] == 2


def test_results_come_in_batches_and_leave_nothing_behind(
    client: Client, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    job = client.submit(prompts(10))
    finish_shard(database)
    batches = job.results(batch_rows=4)
    assert next(batches).num_rows == 4
    assert list((tmp_path / "tmp").iterdir()) != []
    assert [batch.num_rows for batch in batches] == [4, 2]
    assert list((tmp_path / "tmp").iterdir()) == []
    unread = job.results()
    next(unread)
    unread.close()  # type: ignore[attr-defined]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_every_kind_of_data_is_taken(client: Client, tmp_path: Path, files: Path) -> None:
    table = prompts()
    path = tmp_path / "prompts.parquet"
    pq.write_table(table, path)
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(batch_lines(3))
    frame = pd.DataFrame({"prompt": ["one", "two", "three"], "key": [1, 2, 3]})
    for data in (table, table.to_reader(), table.to_batches()[0], frame, path, str(path), lines):
        assert client.submit(data).last_status.counts.total == 3, type(data)
    (files / "a.parquet").write_bytes(path.read_bytes())
    assert client.submit(f"file://{files}/a.parquet").last_status.counts.total == 3


def test_a_frame_comes_back_with_its_columns(client: Client, database: Database) -> None:
    frame = pd.DataFrame(
        {"prompt": ["one", "two"], "when": pd.to_datetime(["2026-01-01", "2026-01-02"]), "x": [0.5, 1.5]}
    )
    job = client.submit(frame)
    finish_shard(database)
    back = job.to_table().to_pandas()
    assert list(back["x"]) == [0.5, 1.5]
    assert list(back["when"]) == list(frame["when"])
    assert list(back["forq_output"]) == ["an answer", "an answer"]


def test_data_that_is_no_table_and_options_that_there_are_not(client: Client, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got a list"):
        client.submit([{"prompt": "one"}])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        client.submit(prompts(), max_token=3)  # type: ignore[call-arg]
    with pytest.raises(FileNotFoundError):
        client.submit(tmp_path / "none.parquet")


def test_every_option_reaches_the_job(client: Client) -> None:
    job = client.submit(
        pa.table({"topic": ["forks"], "id": ["a"]}), model=MODEL, template="About {{ topic }}", system="Be brief.",
        turns=["And then?", "Shorter."], id_column="id", decoding="ar", max_tokens=5, temperature=0.0, top_p=0.9,
        seed=1, n=2, priority=3, kv_share=0.5, name="näme",
    )  # fmt: skip
    assert job.last_status.name == "näme"
    detail = client.job(job.id.lower())
    assert detail.id == job.id


def test_the_servers_line_is_the_error(client: Client) -> None:
    with pytest.raises(RefusedError, match="has no column 'promt'; did you mean 'prompt'") as refusal:
        client.submit(prompts(), prompt_column="promt")
    assert refusal.value.status == 422
    with pytest.raises(RefusedError, match="not configured"):
        client.submit(prompts(), model="nobody")
    with pytest.raises(RefusedError, match="under none of the roots"):
        client.submit("file:///etc/passwd.parquet")
    with pytest.raises(NotFoundError, match="no job") as missing:
        client.job(UNKNOWN_JOB)
    assert missing.value.status == 404
    with pytest.raises(RefusedError, match="max_tokens") as refused:
        client.submit(prompts(), max_tokens="many")  # type: ignore[arg-type]
    assert refused.value.values[0]["where"] == "body.max_tokens"


def test_an_upload_over_the_limit_is_told_as_such(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    path.write_bytes(bytes(40 << 20))  # the server's limit is 32 MiB
    with pytest.raises(RefusedError, match="the upload is over 33554432 bytes") as refusal:
        client.submit(path)
    assert refusal.value.status == 413


def test_a_wait_is_over_in_time_and_tells_changes(client: Client, database: Database) -> None:
    job = client.submit(prompts())
    with pytest.raises(StillRunningError, match=r"is still queued after 0\.2 s") as late:
        job.wait(timeout=0.2)
    assert late.value.status.state == "queued"
    seen: list[JobStatus] = []

    def note(status: JobStatus) -> None:
        seen.append(status)
        if len(seen) == 1:
            finish_shard(database)

    assert job.wait(timeout=30, progress=note).state == "completed"
    assert seen[0].state == "queued"
    assert seen[-1].state == "completed"


def test_a_job_is_cancelled_and_retried(client: Client, database: Database) -> None:
    job = client.submit(prompts())
    assert job.cancel().state == "cancelled"
    with pytest.raises(ConflictError):
        job.cancel()
    job = client.submit(prompts())
    finish_shard(database, failing=(0, 2))
    assert job.wait(timeout=10).counts.failed == 2
    assert job.retry() == 2
    assert job.status().state == "queued"
    assert job.status().counts.completed == 1


def test_jobs_are_listed_over_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.client.client.PAGE_JOBS", 2)
    ids = [client.submit(prompts(1)).id for _ in range(5)]
    assert [job.id for job in client.jobs()][:5] == ids[::-1]
    assert [job.id for job in client.jobs(limit=3)] == ids[:1:-1]
    assert list(client.jobs(state="failed")) == []


def test_models_are_listed(client: Client) -> None:
    models = client.models()
    assert [model.id for model in models if model.is_default] == [MODEL]
    assert models[0].default_max_tokens > 0


def test_results_are_downloaded_and_exported(client: Client, database: Database, tmp_path: Path, files: Path) -> None:
    job = client.submit(prompts())
    finish_shard(database)
    assert pq.read_table(job.download(tmp_path / "answers.parquet")).num_rows == 3
    assert job.download(tmp_path / "answers.jsonl", format="jsonl").read_bytes().count(b"\n") == 3
    assert job.export(f"file://{files}/answers.parquet") == 3
    assert pq.read_table(files / "answers.parquet").num_rows == 3
    with pytest.raises(FileNotFoundError):
        job.download(tmp_path / "none" / "answers.parquet")


def test_an_answer_that_is_lost_makes_no_second_job(proxy: FlakyProxy, database: Database) -> None:
    before = num_jobs(database)
    proxy.faults = [lose_the_answer, lose_the_answer, busy]
    with Client(proxy.url, timeout_s=120, retry_for_s=20) as client:
        job = client.submit(prompts(), name="once")
    assert proxy.num_connections == 4
    assert num_jobs(database) == before + 1
    assert job.last_status.counts.total == 3


def test_a_download_that_breaks_is_begun_again(proxy: FlakyProxy, database: Database) -> None:
    with Client(proxy.url, timeout_s=120, retry_for_s=20) as client:
        job = client.submit(prompts())
        finish_shard(database)
    proxy.faults = [cut_the_answer, cut_the_answer]
    with Client(proxy.url, timeout_s=120, retry_for_s=20) as client:
        assert client.job(job.id).to_table().num_rows == 3
    assert proxy.num_connections >= 3


def test_what_must_not_be_done_twice_is_not_sent_twice(proxy: FlakyProxy, database: Database) -> None:
    with Client(proxy.url) as client:
        job_id = client.submit(prompts()).id
    proxy.faults = [_pass_one_and_lose]
    with Client(proxy.url, retry_for_s=5) as client:
        job = client.job(job_id)
        with pytest.raises(UnreachableError):
            job.cancel()
        assert job.status().state == "cancelled"


def _pass_one_and_lose(client: object, server: object) -> None:
    """Two requests of a kept connection: the first is answered, the second's answer is lost."""
    import socket

    assert isinstance(client, socket.socket)
    assert isinstance(server, socket.socket)
    server.sendall(client.recv(1 << 16))
    client.sendall(server.recv(1 << 16))
    server.sendall(client.recv(1 << 16))
    server.recv(1)


def test_the_same_idempotency_key_is_the_same_job_or_a_conflict(client: Client, database: Database) -> None:
    before = num_jobs(database)
    first = client.submit(prompts(), idempotency_key="mine", name="a")
    assert client.submit(prompts(), idempotency_key="mine", name="a").id == first.id
    with pytest.raises(ConflictError, match=r"belongs to job .*, with another name: send a new key"):
        client.submit(prompts(), idempotency_key="mine", name="b")
    with pytest.raises(ConflictError, match="with another file"):
        client.submit(prompts(4), idempotency_key="mine", name="a")
    with pytest.raises(RefusedError, match="Idempotency-Key has 300 characters"):
        client.submit(prompts(), idempotency_key="x" * 300)
    assert client.submit(prompts(), name="a").id != first.id
    assert num_jobs(database) == before + 2


def test_nobody_there_is_one_line() -> None:
    with Client("http://127.0.0.1:9", retry_for_s=0) as client, pytest.raises(UnreachableError) as failure:
        client.models()
    assert "127.0.0.1:9 gave no answer (ConnectError" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_service_that_comes_up_late_is_waited_for(tmp_path: Path, broker_url: str, templates: Templates) -> None:
    server = Server(settings_in(tmp_path / "home", broker_url, templates))
    with Client(server.url, retry_for_s=200) as client:  # it is not up yet
        assert client.submit(prompts()).last_status.state == "queued"
    server.terminate()


def test_something_else_at_the_address_is_told(proxy: FlakyProxy) -> None:
    proxy.faults = [busy]
    with Client(proxy.url, retry_for_s=0) as client, pytest.raises(ServiceError, match="answered 503, and not as forq"):
        client.models()


def test_keys_are_sent_and_shown_nowhere(tmp_path: Path, broker_url: str, templates: Templates) -> None:
    own = settings_in(tmp_path / "home", broker_url, templates)
    database = Database(own.sqlalchemy_url)
    server = Server(own)
    _, key = keys.create(database, "client", ["submit", "read"], rate_per_minute=6)
    _, reader = keys.create(database, "reader", ["read"])
    with Client(server.url, retry_for_s=200) as client, pytest.raises(NotAllowedError, match="asks for an API key"):
        client.models()
    with Client(server.url, api_key=key, timeout_s=120, retry_for_s=20) as client:
        job = client.submit(prompts())
        assert key not in repr(client) + repr(job) + repr(vars(client))
    with Client(server.url, api_key=key, retry_for_s=0) as client:
        refusals = [_too_many(client) for _ in range(8)]
    late = refusals[-1]
    assert late is not None
    assert late.retry_after_s is not None
    assert 0 < late.retry_after_s <= 10
    with Client(server.url, api_key=key, timeout_s=120, retry_for_s=20) as client:  # waits as long as it is told to
        assert client.job(job.id).id == job.id
    with Client(server.url, api_key=reader) as client, pytest.raises(NotAllowedError, match="needs submit"):
        client.submit(prompts())
    database.dispose()
    server.terminate()


def _too_many(client: Client) -> TooManyError | None:
    try:
        client.models()
    except TooManyError as error:
        return error
    return None


def test_a_base_url_is_one() -> None:
    for url in ("localhost:8765", "ftp://host", "http://", "http://u:p@host"):
        with pytest.raises(ValueError, match="base_url"):
            Client(url)


def test_the_client_needs_no_database_and_no_engine() -> None:
    code = (
        "import sys, jobs.client; "
        "print([name for name in ('sqlalchemy', 'torch', 'vllm', 'celery', 'pandas', 'db') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_program_that_uses_it_is_type_checked_strictly(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "from jobs.client import Client, JobStatus\n"
        "def show(status: JobStatus) -> None:\n"
        "    print(status.counts.completed)\n"
        "def run(path: str) -> int:\n"
        "    with Client('http://127.0.0.1:8765', api_key=None) as client:\n"
        "        job = client.submit(path, prompt_column='prompt', max_tokens=16, turns=['And?'])\n"
        "        job.wait(timeout=60, progress=show)\n"
        "        return sum(1 for _ in job.results(with_trees=True))\n"
    )
    (tmp_path / "bad.py").write_text(
        "from jobs.client import Client\n"
        "Client().submit('a.parquet', max_token=16)\n"
        "Client().submit('a.parquet', max_tokens='16')\n"
        "Client().submit(12)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "good.py"), str(tmp_path / "bad.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    faults = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [fault.partition(":")[2].partition(":")[0] for fault in faults] == ["2", "3", "4"], done.stdout
    assert all("bad.py" in fault for fault in faults), done.stdout
