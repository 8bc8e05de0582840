"""The official client on a server of ours, a stand-in for the worker, and batch lines."""

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from api_support import finish_shard

from db.session import Database
from jobs.settings import DEFAULT_MODEL, Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = CHAT, *, content: str = "Why?", **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": content}]} if url == CHAT else {"prompt": content}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def lines(*values: Any) -> bytes:
    return "".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values).encode()


def many(num: int, **body: Any) -> bytes:
    return lines(*(line(f"c{i}", content=f"question {i}", **body) for i in range(num)))


def client_of(url: str, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **options)


def upload(client: openai.OpenAI, content: bytes, name: str = "batch.jsonl", **options: Any) -> Any:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch", **options)


def create(client: openai.OpenAI, file_id: str, endpoint: Any = CHAT, window: Any = "24h", **options: Any) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window, **options)


def wait_for(client: openai.OpenAI, batch_id: str, *states: str, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in states:
            return batch
        assert time.monotonic() < deadline, f"{batch_id} is still {batch.status}"
        assert batch.status not in ("completed", "failed", "expired", "cancelled"), batch
        time.sleep(0.05)


def read_lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def age(settings: Settings) -> None:
    """As if the store's files had been written two hours ago."""
    for path in settings.data_dir.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)


@contextmanager
def answering(database: Database, **options: Any) -> Iterator[None]:
    """Finish every shard as soon as it is there."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                finish_shard(database, **{"model": DEFAULT_MODEL, **options})
            except AssertionError:  # nothing to lease
                stop.wait(0.02)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()
