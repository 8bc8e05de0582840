"""`forq webhooks`, and the part of `forq up` that sends."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_support import Forq
from standardwebhooks import Webhook

from db.session import Database
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.webhook_settings import WebhookSettings

NO_WEBHOOK = "01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"


@contextmanager
def receiving() -> Iterator[tuple[str, list[tuple[bytes, dict[str, str]]], threading.Semaphore]]:
    """A server's URL, what it got, and a semaphore that counts it."""
    got: list[tuple[bytes, dict[str, str]]] = []
    arrived = threading.Semaphore(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.rfile.read(int(self.headers["Content-Length"])), dict(self.headers.items())))
            self.send_response(200 if self.path == "/hook" else 404)
            self.end_headers()
            arrived.release()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got, arrived
    finally:
        server.shutdown()
        server.server_close()


def test_a_webhook_is_added_tested_listed_rotated_and_removed(run: Forq, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as (url, got, _):
        monkeypatch.setenv("FORQ_WEBHOOKS__ALLOW", json.dumps([url]))
        added = run("webhooks", "add", f"{url}/hook", "--events", "job.completed, job.failed", "--tenant", "a")
        assert added.exit_code == 0, added.err
        secret = added.out.strip()
        assert added.out == f"{secret}\n"
        assert "job.completed, job.failed, tenant a" in added.err
        assert secret not in added.err
        listed = run("webhooks", "list")
        webhook_id, *rest = listed.out.splitlines()[1].split("\t")
        assert rest == ["a", "active", "0", "all", "completed failed", f"{url}/hook"]
        tested = run("webhooks", "test", webhook_id.lower())
        assert (tested.exit_code, tested.out) == (0, "taken: it answered 200\n")
        assert Webhook(secret).verify(*got[0])["type"] == "ping"
        rotated = json.loads(run("webhooks", "rotate", webhook_id, "--at-once", "--json").out)
        run("webhooks", "test", webhook_id)
        assert Webhook(rotated["secret"]).verify(*got[1])["data"] == {"webhook_id": webhook_id}
        wrong = json.loads(run("webhooks", "add", f"{url}/else", "--named-only", "--json").out)
        tested = run("webhooks", "test", wrong["id"], "--json")
        assert tested.exit_code == 1
        assert json.loads(tested.out)["error"] == "answered 404"
        everything = run("webhooks", "list").out + run("webhooks", "list", "--json").out
        assert not any(text in everything for text in (secret, rotated["secret"], wrong["secret"]))
        assert len(json.loads(run("webhooks", "list", "--tenant", "a", "--json").out)) == 1
        assert "is removed" in run("webhooks", "remove", webhook_id).out
        assert run("webhooks", "remove", webhook_id).exit_code == 2


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["add", "https://hooks.example.com/"], "no webhook is allowed here"),
        (["add", "http://u:p@hooks.example.com/"], "user or password"),
        (["add", "https://hooks.example.com/", "--events", ""], "webhook"),
        (["list", "--state", "x"], "--state"),
        (["rotate", NO_WEBHOOK, "--overlap", "99d"], "overlap"),
        (["rotate", NO_WEBHOOK, "--overlap", "1d", "--at-once"], "not both"),
        (["rotate", NO_WEBHOOK], "no webhook"),
        (["remove", NO_WEBHOOK], "no webhook"),
        (["test", NO_WEBHOOK], "no webhook"),
        (["deliveries", "--state", "lost"], "lost"),
        (["deliveries", "--limit", "0"], "limit is 0"),
        (["send"], "webhooks.allow is empty"),
    ],
)
def test_bad_usage_is_one_line(run: Forq, args: list[str], what: str) -> None:
    done = run("webhooks", *args)
    assert (done.exit_code, done.out) == (2, "")
    assert what in done.err
    assert len(done.err.splitlines()) == 1


def test_a_sender_in_its_own_process_sends_and_ends_at_sigterm(
    run: Forq, home: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as (url, got, arrived):
        monkeypatch.setenv("FORQ_WEBHOOKS__ALLOW", json.dumps([url]))
        secret = json.loads(run("webhooks", "add", f"{url}/hook", "--named-only", "--json").out)["secret"]
        for options in ([], ["--webhook", f"{url}/hook"]):
            assert run("submit", str(prompts), "--json", *options).exit_code == 0
        job_ids = [job["job_id"] for job in json.loads(run("list", "--json").out)]
        for job_id in job_ids:
            run("cancel", job_id)
        assert "job.cancelled" in run("webhooks", "deliveries", "--state", "pending").out
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "webhooks", "send"], env={**os.environ}, stderr=subprocess.PIPE
        )
        try:
            assert arrived.acquire(timeout=120)
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
        assert process.returncode == 0, log
        assert secret not in log
        assert Webhook(secret).verify(*got[0])["data"]["job_id"] == job_ids[0]
    (delivery,) = json.loads(run("webhooks", "deliveries", "--job", job_ids[0], "--json").out)
    assert (delivery["state"], delivery["attempts"]) == ("delivered", 1)
    assert json.loads(run("webhooks", "deliveries", "--job", job_ids[1], "--json").out) == []


def test_up_runs_a_sender_where_a_webhook_is_allowed(home: Path, tmp_path: Path) -> None:
    def roles(webhooks: WebhookSettings) -> list[str]:
        settings = Settings(home=home, webhooks=webhooks)
        database = Database(f"sqlite:///{tmp_path / 'x.db'}")
        return [part.role for part in Supervisor(settings, "m", database)._make_parts()]

    assert "webhooks" not in roles(WebhookSettings())
    allowing = WebhookSettings.model_validate({"allow": ["https://hooks.example.com/"]})
    assert roles(allowing) == [*roles(WebhookSettings()), "webhooks"]
