"""A webhook's other end: a real HTTP server that takes down what it gets and answers as it is told."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sqlalchemy import text

from db.session import Database
from jobs.settings import Settings
from jobs.webhook_settings import WebhookSettings

Answer = int | tuple[int, dict[str, str]] | threading.Event
"""A status, one with headers, or what must be set before it answers 200."""


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    port: int
    got: list[Got] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once per request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def wait(self) -> None:
        assert self.arrived.acquire(timeout=60), "nothing arrived"


@contextmanager
def receiving(answer: Callable[[int], Answer] = lambda number: 200, *, tls: Any = None) -> Iterator[Receiver]:
    """`answer` is asked with the number of the request, from 0."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            number = len(receiver.got)
            receiver.got.append(Got(self.path, dict(self.headers.items()), body))
            receiver.arrived.release()
            said = answer(number)
            if isinstance(said, threading.Event):
                said.wait(60)
                said = 200
            status, headers = said if isinstance(said, tuple) else (said, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a sender that hangs up, on purpose

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def allowing(settings: Settings, *urls: Any, **values: Any) -> Settings:
    """The settings with these addresses allowed."""
    webhooks = WebhookSettings.model_validate({"allow": list(urls), **values})
    return settings.model_copy(update={"webhooks": webhooks})


def rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]


def events_of(database: Database) -> list[tuple[str, str | None]]:
    """Type and job of every queued event, in the order they were written."""
    return [(row[0], row[1]) for row in rows(database, "SELECT type, job_id FROM webhook_deliveries ORDER BY id")]


def make_due(database: Database) -> None:
    """As if all delays, claims and pauses were over."""
    with database.write() as connection:
        past = "'2001-01-01 00:00:00.000000'"
        connection.execute(text(f"UPDATE webhook_deliveries SET next_attempt_at = {past} WHERE state = 'pending'"))
        connection.execute(text(f"UPDATE webhooks SET resume_at = {past} WHERE resume_at IS NOT NULL"))
