"""The official OpenAI client against a running service: its whole life cycle, and cancellations at random moments.

    python -m benchmarks.openai_batches --cancels 100 --json

`forq up` with two workers whose engine is a fake one that answers in milliseconds (benchmarks/chaos_harness); broker,
database, API and client are real. First every call of the client's files and batches, with what came of it, errors
included. Then batches of `--lines` lines, each cancelled at a random moment, until so many were cancelled: whatever the
moment, output lines must be the completed and output and error lines the total, each id once and in order. Last, a
batch whose completion window ends while it runs. Exits with 1 where a call or a sum is not as it must be.
"""

import io
import json
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click
import openai

from benchmarks.chaos_harness.plan import MODEL
from benchmarks.chaos_harness.run import Options, fresh_service
from db.session import Database
from jobs import keys
from jobs.logs import configure_logs
from jobs.settings import Settings

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
AT_ONCE = 4
PATIENCE_S = 300.0
LATEST_SHARE = 1.2
"""Of a batch's time to its end, as the moment of a cancellation: some come after it, and are refused."""
EXPIRING_LINES = 20_000


@dataclass
class Report:
    calls: list[dict[str, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def call(self, what: str, expected: str, ask: Callable[[], Any], shown: Callable[[Any], str] = str) -> Any:
        """Make a call and note what came of it: `ok`, or the name of the client's exception."""
        answer = None
        try:
            answer = ask()
            came, told = "ok", shown(answer)
        except openai.APIStatusError as error:
            came, told = f"{type(error).__name__} {error.status_code}", error.message
        self.calls.append({"call": what, "result": came, "told": told})
        self.check(came == expected, f"{what}: {came} instead of {expected}: {told}")
        return answer

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)


@click.command()
@click.option("--cancels", default=100, show_default=True, help="Batches to cancel.")
@click.option("--lines", default=80, show_default=True, help="Lines of each of them.")
@click.option("--seed", default=0, show_default=True)
@click.option("--database", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", show_default=True)
@click.option("--expiry/--no-expiry", default=True, show_default=True, help="Wait a minute for a batch to expire.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end.")
def main(cancels: int, lines: int, seed: int, database: str, expiry: bool, as_json: bool) -> None:
    """Drive the OpenAI-compatible batches with the official client."""
    configure_logs(logging.ERROR)
    options = Options(0, 0, seed, database, "fake", default_leases=False, latency_s=(0.05, 0.4))
    report = Report()
    with fresh_service(options) as system:
        with (system.settings.home / "forq.toml").open("a") as file:
            file.write("[batches]\npoll_s = 0.1\n")
        system.start()
        system.wait_up()
        url = f"http://127.0.0.1:{system.settings.api_port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none")
        life_cycle(client, report)
        said: dict[str, Any] = {"database": database, "client": openai.__version__, "calls": report.calls}
        said["cancels"] = cancel_many(client, report, cancels, lines, seed)
        if expiry:
            said["expiry"] = expire(client, report)
        with_keys(url, system.settings, report)
        said["exit_code"] = system.down()
    said["violations"] = report.violations
    if as_json:
        click.echo(json.dumps(said))
    else:
        show(said)
    sys.exit(1 if report.violations else 0)


def life_cycle(client: openai.OpenAI, report: Report) -> None:
    content = jsonl(4, "good", model=MODEL, max_completion_tokens=8, temperature=0, seed=1)
    content += (json.dumps(line("bad temperature", model=MODEL, temperature=9)) + "\n").encode()
    call = report.call
    call("models.list()", "ok", client.models.list, lambda page: f"{[each.id for each in page]}")
    file = call('files.create(purpose="batch")', "ok", lambda: upload(client, content), of_file)
    call("files.retrieve(FILE)", "ok", lambda: client.files.retrieve(file.id), of_file)
    call("files.content(FILE)", "ok", lambda: client.files.content(file.id).read(), lambda got: f"{got == content=}")
    make = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "metadata": {"run": "1"}}
    batch = call("batches.create(FILE)", "ok", lambda: client.batches.create(**make), of_batch)
    again = call("batches.create(FILE), the same again", "ok", lambda: client.batches.create(**make), of_batch)
    report.check(again.id == batch.id, "a retried creation is another batch")
    done = call("batches.retrieve(BATCH), until it ends", "ok", lambda: wait(client, batch.id), of_batch)
    report.check(done.status == "completed", f"the batch is {done.status}")
    report.check(done.request_counts.to_dict() == {"total": 5, "completed": 4, "failed": 1}, "its counts are others")
    call("batches.list()", "ok", lambda: client.batches.list(limit=1), lambda page: f"{len(page.data)} batch")
    call("files.content(OUTPUT)", "ok", lambda: read(client, done.output_file_id), of_lines)
    call("files.content(ERRORS)", "ok", lambda: read(client, done.error_file_id), of_lines)
    call("files.list(purpose=\"batch_output\")", "ok",
         lambda: list(client.files.list(purpose="batch_output")), lambda got: f"{len(got)} files")  # fmt: skip
    call("batches.cancel(BATCH), which has ended", "BadRequestError 400", lambda: client.batches.cancel(batch.id))
    call("batches.retrieve(unknown)", "NotFoundError 404", lambda: client.batches.retrieve("batch_x"))
    call("batches.create(unknown file)", "NotFoundError 404",
         lambda: client.batches.create(**{**make, "input_file_id": "file-01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"}))  # fmt: skip
    call("batches.create(OUTPUT)", "BadRequestError 400",
         lambda: client.batches.create(**{**make, "input_file_id": done.output_file_id}))  # fmt: skip
    call('batches.create(endpoint="/v1/embeddings")', "BadRequestError 400",
         lambda: client.batches.create(**{**make, "endpoint": "/v1/embeddings"}))  # fmt: skip
    call('files.create(purpose="fine-tune")', "BadRequestError 400",
         lambda: client.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="fine-tune"))  # fmt: skip
    twice = upload(client, content + content)
    refused = client.batches.create(**{**make, "input_file_id": twice.id})
    refused = call("batches.retrieve(BATCH of a file with ids twice)", "ok", lambda: wait(client, refused.id), of_batch)
    report.check(refused.status == "failed" and len(refused.errors.data) == 5, "a bad file was not refused by line")
    call("files.delete(FILE)", "ok", lambda: client.files.delete(file.id), lambda got: f"deleted={got.deleted}")
    call("files.retrieve(FILE), deleted", "NotFoundError 404", lambda: client.files.retrieve(file.id))


def cancel_many(client: openai.OpenAI, report: Report, num: int, num_lines: int, seed: int) -> dict[str, Any]:
    file = upload(client, jsonl(num_lines, "c", model=MODEL))
    run = Cancellations(client, report, file.id, num, num_lines, random.Random(seed))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(run.work) for _ in range(AT_ONCE)]:
            done.result()
    return run.said()


@dataclass
class Cancellations:
    """Batches that are cancelled at moments drawn from as long as a batch takes just now, by several at once."""

    client: openai.OpenAI
    report: Report
    file_id: str
    num: int
    num_lines: int
    rng: random.Random
    whole_s: list[float] = field(default_factory=list)
    """Times of batches that were not cancelled, to their end."""
    state_before: Counter[str] = field(default_factory=Counter)
    answered: list[int] = field(default_factory=list)
    """Answers of each batch that was cancelled."""
    num_begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        while True:
            with self.lock:
                if len(self.answered) >= self.num:
                    return
                number, self.num_begun = self.num_begun, self.num_begun + 1
                is_whole = number < AT_ONCE
                wait_s = 0.0 if is_whole else self.rng.uniform(0, LATEST_SHARE * self.usual_s)
            began = time.monotonic()
            batch = create(self.client, self.file_id, metadata={"number": str(number)})
            before = None if is_whole else self.cancel(batch.id, wait_s)
            batch = wait(self.client, batch.id)
            took_s = time.monotonic() - began
            num_answers = check_sums(self.client, self.report, batch, self.num_lines)
            expected = "completed" if before is None else "cancelled"
            self.report.check(batch.status == expected, f"{batch.id} is {batch.status} instead of {expected}")
            with self.lock:
                if before is None:
                    self.whole_s.append(took_s)
                else:
                    self.state_before[before] += 1
                    self.answered.append(num_answers)
                    print(
                        f"{len(self.answered)}/{self.num} {before}, {num_answers} answers", file=sys.stderr, flush=True
                    )

    def cancel(self, batch_id: str, wait_s: float) -> str | None:
        """The state it was in before; None where it had ended."""
        time.sleep(wait_s)
        before: str = self.client.batches.retrieve(batch_id).status
        try:
            self.client.batches.cancel(batch_id)
        except openai.BadRequestError:
            return None
        return before

    @property
    def usual_s(self) -> float:
        recent = self.whole_s[-AT_ONCE:]
        return sum(recent) / len(recent) if recent else 1.0

    def said(self) -> dict[str, Any]:
        return {
            "cancelled": len(self.answered),
            "refused_because_ended": len(self.whole_s) - AT_ONCE,
            "lines": self.num_lines,
            "state_before": dict(self.state_before),
            "with_no_answer": self.answered.count(0),
            "with_some_answers": sum(0 < each < self.num_lines for each in self.answered),
            "with_all_answers": self.answered.count(self.num_lines),
            "whole_batch_s": round(sum(self.whole_s) / len(self.whole_s), 2),
        }


def expire(client: openai.OpenAI, report: Report) -> dict[str, Any]:
    file = upload(client, jsonl(EXPIRING_LINES, "e", model=MODEL))
    batch = create(client, file.id, completion_window="1m")
    done = report.call("batches.retrieve(BATCH with a window of 1m)", "ok", lambda: wait(client, batch.id), of_batch)
    report.check(done.status == "expired", f"a batch of {EXPIRING_LINES} lines is {done.status} after a minute")
    codes = {each["error"]["code"] for each in read(client, done.error_file_id)}
    report.check(codes == {"batch_expired"}, f"error lines say {codes}")
    num = check_sums(client, report, done, EXPIRING_LINES)
    return {"lines": EXPIRING_LINES, "answered": num, "after_s": done.expired_at - done.created_at}


def with_keys(url: str, settings: Settings, report: Report) -> None:
    """Last: from the first key on, nobody goes without one."""
    database = Database(settings.sqlalchemy_url)
    whole, reader, other = (
        openai.OpenAI(base_url=url, api_key=keys.create(database, "a benchmark's", scopes, tenant=tenant)[1])
        for scopes, tenant in ((("submit", "read"), "a"), (("read",), "a"), (("submit", "read"), "b"))
    )
    database.dispose()
    nobody = openai.OpenAI(base_url=url, api_key="none")
    content, call = jsonl(1, "k", model=MODEL), report.call
    call("files.list(), no key of ours", "AuthenticationError 401", lambda: nobody.files.list())
    call("files.create(), a key that may only read", "PermissionDeniedError 403", lambda: upload(reader, content))
    file = call("files.create(), with a key", "ok", lambda: upload(whole, content), of_file)
    call("files.retrieve(FILE), another tenant", "NotFoundError 404", lambda: other.files.retrieve(file.id))
    call("files.list(), another tenant", "ok", lambda: other.files.list(), lambda page: f"{len(page.data)} files")


def check_sums(client: openai.OpenAI, report: Report, batch: Any, num_lines: int) -> int:
    """Returns the number of answers."""
    answers, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    counts, what = batch.request_counts, f"{batch.id} ({batch.status})"
    if counts.total == 0:  # cancelled before its file was read: there was no request yet
        report.check(batch.status == "cancelled" and not answers and not errors, f"{what} has lines and no total")
        return 0
    report.check(counts.total == num_lines, f"{what}: {counts.total} in all instead of {num_lines}")
    report.check(len(answers) == counts.completed, f"{what}: {len(answers)} output lines, {counts.completed} completed")
    report.check(len(answers) + len(errors) == counts.total, f"{what}: {len(answers)} + {len(errors)} lines")
    ids = [[int(each["custom_id"].split("-")[1]) for each in lines] for lines in (answers, errors)]
    report.check(sorted(ids[0] + ids[1]) == list(range(num_lines)), f"{what}: an id is missing or there twice")
    report.check(all(each == sorted(each) for each in ids), f"{what}: lines are not in input order")
    report.check(
        all(each["response"]["status_code"] == 200 for each in answers), f"{what}: an output line is no answer"
    )
    return len(answers)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {custom_id}"}]
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def jsonl(num: int, name: str, **body: Any) -> bytes:
    return "".join(json.dumps(line(f"{name}-{i}", **body)) + "\n" for i in range(num)).encode()


def upload(client: openai.OpenAI, content: bytes) -> Any:
    return client.files.create(file=("batch.jsonl", io.BytesIO(content)), purpose="batch")


def create(client: openai.OpenAI, file_id: str, completion_window: Any = "24h", **options: Any) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window=completion_window, **options
    )


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()] if file_id else []


def wait(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ENDED:
            return batch
        if time.monotonic() > deadline:
            raise TimeoutError(f"{batch_id} is {batch.status} after {PATIENCE_S:.0f} s")
        time.sleep(0.1)


def of_file(file: Any) -> str:
    return f"{file.status}, {file.bytes} bytes, {file.purpose}"


def of_batch(batch: Any) -> str:
    counts = batch.request_counts
    told = f"{batch.status}, {counts.completed} completed and {counts.failed} failed of {counts.total}"
    first = batch.errors.data[0] if batch.errors else None
    return f"{told}; line {first.line}: {first.code}" if first else told


def of_lines(lines: list[dict[str, Any]]) -> str:
    return f"{len(lines)} lines, status {sorted({each['response']['status_code'] for each in lines})}"


def show(said: dict[str, Any]) -> None:
    for each in said["calls"]:
        click.echo(f"{each['call']:52} {each['result']:28} {each['told'][:100]}")
    for name in ("cancels", "expiry", "violations"):
        click.echo(f"{name}: {said.get(name)}")


if __name__ == "__main__":
    main()
