"""The Python client and what stands between: lost answers, other servers, keys; and what it asks of its users."""

import subprocess
import sys
from pathlib import Path

import pytest
from api_support import finish_shard, prompts
from client_support import num_jobs, settings_in
from database_fixtures import Templates
from flaky_proxy import FlakyProxy, busy, cut_the_answer, lose_the_answer, pass_one_and_lose
from server_process import ROOT, Server

from db.session import Database
from jobs import keys
from jobs.client import (
    Client,
    ConflictError,
    NotAllowedError,
    RefusedError,
    ServiceError,
    TooManyError,
    UnreachableError,
)


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
    proxy.faults = [pass_one_and_lose]
    with Client(proxy.url, retry_for_s=5) as client:
        job = client.job(job_id)
        with pytest.raises(UnreachableError):
            job.cancel()
        assert job.status().state == "cancelled"


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
