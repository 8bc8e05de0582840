"""A service to which a canary is given wherever a user may put text, and what it left and showed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from leaks import Canary
from quoting_worker import DIES, PANICS, REFUSED
from service import UP_S, Service, eventually

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

[webhooks]
allow = [{{url = "http://127.0.0.1:9/", allow_private = true}}]
"""
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
    webhook_secret: str = ""
    jobs: dict[str, str] = field(default_factory=dict)
    """Way and file → job."""
    ids: dict[str, list[str]] = field(default_factory=dict)
    """Of the other things that routes name: parameter → ids."""
    batches: dict[str, str] = field(default_factory=dict)
    """File → what the batch made of it came to, with all its files' contents, as its owner reads it."""
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
    refused = {"messages": [{"role": "user", "content": f"{canary.at('line_refused')} {REFUSED}"}]}
    good = json.loads(lines(canary).splitlines()[0])
    (folder / "good.jsonl").write_text("".join(
        json.dumps(line) + "\n" for line in [good, {**good, "custom_id": canary.at("custom_refused"), "body": refused}]
    ))  # fmt: skip
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


def submit_by_batches(traces: Traces, folder: Path, http: httpx.Client) -> None:
    """OpenAI's way: files, batches, and what their owner gets back."""
    ids = traces.ids
    for name in ("good.jsonl", "lines.jsonl"):
        content = (folder / name).read_bytes()
        given = {"file": (f"{traces.canary.at('filename')}.jsonl", content)}
        file = http.post("/v1/files", files=given, data={"purpose": "batch"}).raise_for_status().json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h",
                 "metadata": {"note": traces.canary.at("metadata")}}  # fmt: skip
        batch = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]

        def state(batch: str = batch) -> str:
            return str(http.get(f"/v1/batches/{batch}").json()["status"])

        eventually(lambda state=state: state() in ("completed", "failed"), f"the end of {batch}")
        told = http.get(f"/v1/batches/{batch}").json()
        made = [told[key] for key in ("output_file_id", "error_file_id") if told.get(key)]
        ids.setdefault("batch_id", []).append(batch)
        ids.setdefault("file_id", []).extend([file, *made])
        texts = [http.get(f"/v1/files/{made_id}/content").raise_for_status().text for made_id in made]
        traces.batches[name] = "\n".join([json.dumps(told), *texts])


def add_webhook(traces: Traces, http: httpx.Client) -> None:
    """Nobody listens there: each attempt fails, and says so in the sender's log."""
    secret_path = f"http://127.0.0.1:9/{traces.canary.at('hook')}?token={traces.canary.at('token')}"
    made = http.post("/v1/webhooks", json={"url": secret_path}).raise_for_status().json()
    traces.ids["webhook_id"] = [made["id"]]
    traces.webhook_secret = made["secret"]
    http.post(f"/v1/webhooks/{made['id']}/test").raise_for_status()


def filled(path: str, ids: dict[str, list[str]]) -> list[str]:
    """A route's path with each id of each parameter; none where it has a parameter of which there is no id."""
    paths = [path]
    for name, values in ids.items():
        paths = [each.replace(f"{{{name}}}", value) for each in paths for value in values]
    return sorted({each for each in paths if "{" not in each})


def ask_around(traces: Traces, theirs: str) -> None:
    """As the probes, another tenant, and people without a key or with a wrong one."""
    with httpx.Client(base_url=traces.service.url) as http:
        stranger = {"Authorization": f"Bearer {theirs}"}
        document = http.get("/openapi.json", headers=stranger).json()
        paths = [path for path, operations in document["paths"].items() if "get" in operations]
        ids = {"job_id": list(traces.jobs.values()), "row": ["0"], **traces.ids}
        asked = {path for route in paths for path in filled(route, ids)}
        for path in sorted({*asked, "/openapi.json", "/metrics", "/health"}):
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


def secret_part(key: str) -> str:
    return key.split("_", 2)[2]  # which may hold one itself
