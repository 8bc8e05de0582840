"""A canary is submitted wherever a user may put text, in every way; then it is looked for wherever it must not be.

What is by design: a row's text, its error and its answer are in SQL in that row (and a job's name and template in the
job, and in what its webhooks are told), in exports and the drop folder's results, in the stored copy of the file; a
refusal may quote the file, to whoever sent it, in `rejected/` and in a failed batch. Nothing of it is in logs,
messages, probes, other tenants' answers, Parquet footers that forq writes, command lines, temporary files or any other
column.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from leak_scenario import (
    CONFIGURATION,
    MODEL,
    QuotingService,
    Traces,
    add_webhook,
    ask_around,
    secret_part,
    submit_by_batches,
    submit_by_command,
    submit_by_drop,
    submit_by_http,
    write_inputs,
)
from leaks import Canary, Monitor, Processes, columns_with, files_below, footer_of
from service import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MAY_HOLD = ("forq.db", "forq.db-wal", "forq.db-shm", "data", "accepted", "rejected", "outbox", "work")
"""In FORQ_HOME: what holds users' texts by design; `work` is the test's own."""
COLUMNS = {"requests.payload", "requests.custom_id", "requests.sampling", "requests.error", "outputs.text", "jobs.name",
           "jobs.mapping", "files.filename", "batches.labels", "batches.errors", "webhooks.url",
           "webhook_deliveries.payload"}  # fmt: skip


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    service = QuotingService(tmp_path_factory.mktemp("leaks") / "home", CONFIGURATION)
    canary = Canary(f"canary{secrets.token_hex(6)}")
    traces = Traces(service, canary)
    folder = service.work
    write_inputs(folder, canary)
    try:
        with Processes() as processes:
            service.up()
            (folder / "rendered.parquet").write_bytes((folder / "prompts.parquet").read_bytes())
            traces.secret = service.forq("keys", "create", "ours", "--scope", "admin").stdout.strip()
            theirs = service.forq("keys", "create", "theirs", "--scope", "read", "--tenant", "b").stdout.strip()
            headers = {"Authorization": f"Bearer {traces.secret}"}
            with (
                Monitor(service.home / "run" / "valkey.sock") as monitor,
                httpx.Client(base_url=service.url, headers=headers, timeout=60) as http,
            ):
                add_webhook(traces, http)
                submit_by_command(traces, folder)
                submit_by_http(traces, folder, http)
                submit_by_drop(traces, folder)
                submit_by_batches(traces, folder, http)
                traces.jobs["doomed"] = json.loads(traces.command("submit", "doomed.parquet", "--json").stdout)[
                    "job_id"
                ]
                for job in traces.jobs.values():
                    eventually(lambda job=job: http.get(f"/v1/jobs/{job}").json()["finished_at"], f"the end of {job}")
                ask_around(traces, theirs)
                for way, job in traces.jobs.items():
                    target = folder / f"{job}.parquet"
                    if way.startswith("http"):
                        target.write_bytes(http.get(f"/v1/jobs/{job}/results").content)
                    else:
                        assert traces.command("export", job, target).returncode == 0
                    traces.exports.append(target)
                traces.command("wait", traces.jobs["doomed"])
                traces.command("stats", traces.jobs["command prompts.parquet"])
                for command in (["ps"], ["doctor"], ["keys", "list"], ["webhooks", "deliveries"],
                                ["purge", "--older-than", "1d", "--dry-run"]):  # fmt: skip
                    traces.command(*command)
                traces.broker = monitor.said()
            service.down()
        traces.processes = "\n".join(processes.seen.values())
        yield traces
    finally:
        service.clean_up()


def rows_of(path: Path) -> str:
    """Its pages are compressed."""
    return str(pq.read_table(path).to_pylist())


def test_the_canary_is_in_sql_in_the_columns_that_are_its_own_and_in_no_other(traces: Traces) -> None:
    with traces.service.database() as database:
        assert columns_with(traces.canary, database) == COLUMNS


def test_it_is_in_the_exports_and_not_in_their_footers(traces: Traces) -> None:
    found = {place for path in traces.exports for place in traces.canary.found_in(rows_of(path))}
    assert found >= {"prompt", "note", "id", "stop", "message", "line", "refused", "panic", "death"}
    assert len(traces.exports) > 9
    for path in traces.exports:
        assert not traces.canary.found_in(footer_of(path)), path
    # The same look into a file that was written with statistics, as users do: of each column, two values.
    assert traces.canary.found_in(footer_of(traces.service.work / "prompts.parquet"))


def test_a_batch_and_its_files_tell_their_owner_and_nobody_else(traces: Traces) -> None:
    """That nobody else is told is among what was shown to others."""
    found = set(traces.canary.found_in(traces.batches["good.jsonl"]))
    assert found >= {"metadata", "custom_id", "custom_refused", "line"}
    assert '"status": "failed"' in traces.batches["lines.jsonl"]
    assert {name: len(ids) for name, ids in traces.ids.items()} == {"webhook_id": 1, "batch_id": 2, "file_id": 4}


def test_it_is_not_in_the_footers_of_what_is_made_of_jsonl(traces: Traces) -> None:
    given = (traces.service.work / "prompts.parquet").read_bytes(), (traces.service.work / "chats.parquet").read_bytes()
    stored = [path for path in (traces.service.home / "data").glob("*.parquet") if path.read_bytes() not in given]
    made = [path for path in stored if "line" in traces.canary.found_in(rows_of(path))]
    assert made
    for path in made:
        assert not traces.canary.found_in(footer_of(path))


def test_rows_that_fail_in_every_way_were_among_it(traces: Traces) -> None:
    with traces.service.database() as database, database.read() as connection:
        codes = connection.exec_driver_sql("SELECT DISTINCT error_code FROM requests").scalars().all()
    expected = {"prompt_too_large", "prompt_too_long", "engine_refused", "invalid_sampling", "template_failed",
                "invalid_messages", "invalid_request", "empty_prompt", "poison", None}  # fmt: skip
    assert set(codes) >= expected
    refused = " ".join(traces.refusals)
    assert set(traces.canary.found_in(refused)) >= {"custom_id"}  # quoted to whoever sent it
    deaths = (traces.service.home / "logs" / "worker.log").read_text()
    assert "engine_died" in deaths
    assert "shard_failed" in deaths


def test_no_file_but_those_that_are_meant_to_hold_it_does(traces: Traces) -> None:
    home = traces.service.home
    looked_at = list(files_below(home, but=MAY_HOLD))
    assert {"up.log", "worker.log", "api.log", "watch.log", "broker.log"} <= {path.name for path in looked_at}
    found = {str(path): traces.canary.found_in(path.read_bytes()) for path in looked_at}
    assert {path: places for path, places in found.items() if places} == {}
    receipts = list((home / "outbox").glob("*.json"))
    assert receipts
    assert not any(traces.canary.found_in(path.read_text()) for path in receipts)
    assert [path for path in (home / "temporary").rglob("*") if path.is_file()] == []
    assert [path for path in (home / "tmp").iterdir()] == []


def test_no_message_command_line_or_environment_holds_it(traces: Traces) -> None:
    assert MODEL in traces.broker
    assert "LPUSH" in traces.broker
    assert not traces.canary.found_in(traces.broker)
    seen = traces.processes
    assert all(part in seen for part in ("jobs.cli api", "jobs.cli watch", "quoting_worker --model", "forkserver"))
    # The one that a user typed: everybody on the machine sees a command's flags.
    assert traces.canary.found_in(seen) in ([], ["name"])


def test_no_command_or_answer_to_others_shows_it(traces: Traces) -> None:
    for text in [*traces.printed, *traces.shown_to_others]:
        assert not traces.canary.found_in(text), text
    assert len(traces.shown_to_others) > 100


def test_a_key_is_shown_where_it_is_made_and_nowhere_else(traces: Traces) -> None:
    secret = secret_part(traces.secret)
    assert len(secret) >= 22
    shown = [*traces.printed, *traces.shown_to_others, *traces.refusals, traces.broker, traces.processes]
    assert not any(secret in text for text in shown)
    for path in files_below(traces.service.home, but=()):
        assert secret.encode() not in path.read_bytes(), path


def test_a_webhooks_secret_is_shown_where_it_is_made_and_kept_where_it_signs(traces: Traces) -> None:
    secret = traces.webhook_secret.removeprefix("whsec_")
    assert len(secret) > 40
    shown = [*traces.printed, *traces.shown_to_others, *traces.refusals, *traces.batches.values(), traces.broker]
    assert not any(secret in text for text in [*shown, traces.processes])
    holding = {path.name for path in files_below(traces.service.home, but=()) if secret.encode() in path.read_bytes()}
    assert holding <= {"forq.db", "forq.db-wal"}
    assert "webhook_attempt_failed" in "".join(path.read_text() for path in traces.service.home.glob("logs/*.log"))


def test_the_search_finds_what_is_spelled_differently() -> None:
    import base64

    canary = Canary("canary0123456789ab")
    for shift in range(3):
        assert canary.found_in(base64.b64encode(b"x" * shift + canary.stem.encode() + b"rest")) == ["?"]
    assert canary.found_in(f"tokens {list(canary.stem.encode())}") == ["?"]
    assert canary.found_in(f"a {canary.at('place').upper()} b") == ["PLACE"]
    assert canary.found_in("canary") == []
