"""A canary is submitted wherever a user may put text, in every way; then it is looked for wherever it must not be.

What is by design: a row's text, its error and its answer are in SQL in that row (and a job's name and template in the
job), in exports and the drop folder's results, in the stored copy of the file; a refusal may quote the file, to whoever
sent it and in `rejected/`. Nothing of it is in logs, messages, probes, other tenants' answers, Parquet footers that
forq writes, command lines, temporary files or any other column.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from leaks import Canary, Monitor, Processes, columns_with, files_below, footer_of
from quoting_worker import DIES, PANICS, REFUSED
from service import UP_S, Service, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "quoting"
CONFIGURATION = f"""
default_model = "{MODEL}"

[models.{MODEL}]
path = "/nonexistent"

[queue]
shard_rows = 1
max_attempts = 1
heartbeat_s = 0.5
sweep_s = 0.5
flush_s = 0.1
drain_s = 5.0

[limits]
max_cell_bytes = 10000

[drop]
poll_s = 0.2
settle_s = 0.4
give_up_s = 1.0
"""
MAY_HOLD = ("forq.db", "forq.db-wal", "forq.db-shm", "data", "accepted", "rejected", "outbox", "work")
"""In FORQ_HOME: what holds users' texts by design; `work` is the test's own."""
COLUMNS = {"requests.payload", "requests.custom_id", "requests.sampling", "requests.error", "outputs.text", "jobs.name",
           "jobs.mapping"}  # fmt: skip
REPOSITORY = Path(__file__).parents[2]


class QuotingService(Service):
    """`forq up` in the foreground, its worker's engine the one that quotes."""

    def up(self) -> None:
        temporary = self.home / "temporary"
        temporary.mkdir()
        paths = f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"
        self._environment |= {"PYTHONPATH": paths, "TMPDIR": str(temporary)}
        log = self.home / "logs" / "up.log"
        log.parent.mkdir()
        with log.open("wb") as file:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "quoting_worker", "up", "--model", MODEL],
                cwd=self.work, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        eventually(lambda: b"forq is up:" in log.read_bytes() or self._up.poll() is not None, "forq is up", UP_S)
        assert self._up.poll() is None, log.read_text()

    def down(self) -> None:
        self._up.send_signal(signal.SIGINT)
        assert self._up.wait(60) == 0


@dataclass
class Traces:
    """What the scenario left and showed."""

    service: Service
    canary: Canary
    secret: str = ""
    jobs: dict[str, str] = field(default_factory=dict)
    """Way and file → job."""
    printed: list[str] = field(default_factory=list)
    """By commands that show nothing of a row."""
    shown_to_others: list[str] = field(default_factory=list)
    """By the probes, to another tenant, to nobody in particular."""
    refusals: list[str] = field(default_factory=list)
    exports: list[Path] = field(default_factory=list)
    broker: str = ""
    processes: str = ""

    def command(self, *args: object) -> "subprocess.CompletedProcess[str]":
        done = self.service.forq(*args)
        self.printed.append(done.stdout + done.stderr)
        return done


def prompts(canary: Canary) -> pa.Table:
    long = {"too_large": "x" * 20_000, "too_long": "y" * 5000}
    texts = [canary.at("prompt"), *(canary.at(place) + more for place, more in long.items()),
             f"{canary.at('refused')} {REFUSED}", canary.at("hot"), canary.at("beside_stop"), " "]  # fmt: skip
    sampling = [{"temperature": 9.0 if place == 4 else None, "stop": None} for place in range(7)]
    sampling[4]["stop"] = [canary.at("bad_stop") * 30]
    sampling[5]["stop"] = [canary.at("stop")]
    kind = pa.struct([("temperature", pa.float64()), ("stop", pa.list_(pa.string()))])
    return pa.table({
        "prompt": texts,
        "key": [canary.at("note"), *[canary.at("id")] * 6],  # the first row's template is rendered, the others' fail
        "note": [canary.at("note")] * 7,
        "sampling": pa.array(sampling, kind),
    })  # fmt: skip


def chats(canary: Canary) -> pa.Table:
    roles = ["user", canary.at("role")]
    return pa.table({"messages": [[{"role": role, "content": canary.at("message")}] for role in roles]})


def lines(canary: Canary) -> str:
    body = {"messages": [{"role": "user", "content": canary.at("line")}], "stop": canary.at("line_stop")}
    line = {"custom_id": canary.at("custom_id"), "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = [
        {**line, "custom_id": "2", "method": canary.at("method")},
        {**line, "custom_id": "3", "url": canary.at("url")},
        {**line, "custom_id": "4", "body": {**body, canary.at("unknown"): 1}},
        {**line, "custom_id": "5", "body": {"messages": canary.at("not_messages")}},
    ]
    return "".join(json.dumps(each) + "\n" for each in [line, *bad])


def write_inputs(folder: Path, canary: Canary) -> None:
    pq.write_table(prompts(canary), folder / "prompts.parquet")
    pq.write_table(chats(canary), folder / "chats.parquet")
    (folder / "lines.jsonl").write_text(lines(canary))
    (folder / "rendered.j2").write_text(f"{canary.at('template')} {{{{ prompt }}}} {{{{ {{}}[note] if key != note }}}}")
    whole = (folder / "prompts.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.jsonl").write_text(lines(canary) + f'{{"custom_id": "{canary.at("garbage")}"\n')
    (folder / "twice.jsonl").write_text(lines(canary) * 2)
    doomed = [f"{canary.at('panic')} {PANICS}", f"{canary.at('death')} {DIES}", canary.at("neighbour")]
    pq.write_table(pa.table({"prompt": doomed}), folder / "doomed.parquet")


GOOD = {"prompts.parquet": {"name", "id_column"}, "rendered.parquet": {"template"}, "chats.parquet": set(),
        "lines.jsonl": set()}  # fmt: skip
"""File → which options are given with it."""
BAD = ("cut.parquet", "cut.jsonl", "twice.jsonl")


def options_for(name: str, canary: Canary, folder: Path) -> dict[str, str]:
    said = {"name": canary.at("name"), "id_column": "key", "template": (folder / "rendered.j2").read_text()}
    return {key: said[key] for key in sorted(GOOD[name])}


def submit_by_command(traces: Traces, folder: Path) -> None:
    for name in GOOD:
        options = options_for(name, traces.canary, folder)
        if "template" in options:
            options["template"] = "rendered.j2"
        flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
        done = traces.command("submit", name, *flags, "--json")
        assert done.returncode == 0, done.stderr
        traces.jobs[f"command {name}"] = json.loads(done.stdout)["job_id"]
    for name in BAD:
        done = traces.service.forq("submit", name)
        assert done.returncode == 2, done
        traces.refusals.append(done.stderr)


def submit_by_http(traces: Traces, folder: Path, http: httpx.Client) -> None:
    for name in GOOD:
        options = options_for(name, traces.canary, folder)
        answer = http.post("/v1/jobs", files={"file": (name, (folder / name).read_bytes())}, data=options)
        assert answer.status_code == 201, answer.text
        traces.jobs[f"http {name}"] = answer.json()["job_id"]
    for name in BAD:
        answer = http.post("/v1/jobs", files={"file": (name, (folder / name).read_bytes())})
        assert answer.status_code == 422
        traces.refusals.append(answer.text)
    answer = http.post("/v1/jobs", files={"file": ("a.parquet", b"")}, data={"template": "{{ " + traces.canary.at("x")})
    assert answer.status_code == 422
    traces.refusals.append(answer.text)


def submit_by_drop(traces: Traces, folder: Path) -> None:
    home = traces.service.home
    inbox, outbox, rejected = home / "inbox", home / "outbox", home / "rejected"
    for name in GOOD:
        options = options_for(name, traces.canary, folder)
        (inbox / f"{name}.job.toml").write_text(
            "".join(f"{key} = {json.dumps(text)}\n" for key, text in options.items())
        )
        (inbox / name).write_bytes((folder / name).read_bytes())
    for name in BAD:
        (inbox / name).write_bytes((folder / name).read_bytes())
    (inbox / "odd.parquet.job.toml").write_text(f'model = "{traces.canary.at("toml")}')
    (inbox / "odd.parquet").write_bytes((folder / "chats.parquet").read_bytes())

    def is_done() -> bool:
        reasons = {path.name.removesuffix(".reason.txt") for path in rejected.glob("*.reason.txt")}
        results = [path for path in outbox.iterdir() if path.suffix in (".parquet", ".jsonl")]
        return reasons >= {*BAD, "odd.parquet"} and len(results) >= len(GOOD)

    eventually(is_done, "dropped files are answered or rejected")
    traces.exports += [path for path in outbox.iterdir() if path.suffix == ".parquet"]


def ask_around(traces: Traces, theirs: str) -> None:
    """As the probes, another tenant, and people without a key or with a wrong one."""
    with httpx.Client(base_url=traces.service.url) as http:
        stranger = {"Authorization": f"Bearer {theirs}"}
        document = http.get("/openapi.json", headers=stranger).json()
        paths = [path for path, operations in document["paths"].items() if "get" in operations]
        for job in traces.jobs.values():
            filled = [path.replace("{job_id}", job).replace("{row}", "0") for path in paths]
            for path in [*(path for path in filled if "{" not in path), "/openapi.json", "/metrics", "/health"]:
                for headers in ({}, stranger):
                    answer = http.get(path, headers=headers)
                    assert answer.status_code in (200, 401, 403, 404), (path, answer.text)
                    traces.shown_to_others.append(f"{answer.headers} {answer.text}")
        bad_key = traces.canary.at("bad_key")
        for key in (bad_key, f"forq_{bad_key}_{'x' * 43}", f"{traces.secret}x", secret_part(traces.secret)):
            answer = http.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401
            traces.shown_to_others.append(answer.text)
        http.get("/v1/jobs", params={"key": traces.secret, traces.canary.at("query"): traces.canary.at("query")})


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
                submit_by_command(traces, folder)
                submit_by_http(traces, folder, http)
                submit_by_drop(traces, folder)
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
                for command in (["ps"], ["doctor"], ["keys", "list"], ["purge", "--older-than", "1d", "--dry-run"]):
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


def secret_part(key: str) -> str:
    return key.split("_", 2)[2]  # which may hold one itself


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


def test_the_search_finds_what_is_spelled_differently() -> None:
    import base64

    canary = Canary("canary0123456789ab")
    for shift in range(3):
        assert canary.found_in(base64.b64encode(b"x" * shift + canary.stem.encode() + b"rest")) == ["?"]
    assert canary.found_in(f"tokens {list(canary.stem.encode())}") == ["?"]
    assert canary.found_in(f"a {canary.at('place').upper()} b") == ["PLACE"]
    assert canary.found_in("canary") == []
