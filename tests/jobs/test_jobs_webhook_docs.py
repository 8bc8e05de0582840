"""The receiver in docs/webhooks.md, run as it is written there."""

import re
import threading
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from batches import drain, submit_rows
from receiver import allowing, make_due
from standardwebhooks import Webhook
from test_jobs_webhook_sending import send

from db.session import Database
from jobs.settings import Settings
from jobs.webhooks import registry
from jobs.webhooks.deliveries import list_deliveries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "webhooks.md"


def test_the_receiver_in_the_page_takes_an_event_once_and_refuses_what_another_signed(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    server = HTTPServer(("127.0.0.1", 0), None)  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    settings = allowing(settings, url)
    described, secret = registry.add(database, settings, url, ["job.completed"])
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    page: dict[str, Any] = {"__name__": "page"}
    exec(code, page)
    server.RequestHandlerClass = page["Receiver"]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        job_id = submit_rows(database, settings, 2)
        drain(database)
        send(database, settings)
        with database.write() as connection:  # as if the answer had been lost
            connection.exec_driver_sql("UPDATE webhook_deliveries SET state = 'pending'")
        make_due(database)
        send(database, settings)
        said = capsys.readouterr().out
        assert said.count("job.completed {") == 1
        assert job_id in said
        page["webhook"] = Webhook(registry.new_secret())
        registry.queue_ping(database, described["id"])
        send(database, settings)
    finally:
        server.shutdown()
        server.server_close()
    states = {row["type"]: (row["state"], row["attempts"], row["last_status"]) for row in list_deliveries(database)}
    assert states == {"job.completed": ("delivered", 2, 204), "ping": ("pending", 1, 401)}
