"""What S3 and GCS must both do, on real servers: objects are read whole or not at all, written whole or not at all, and
every way it can fail is one line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gcs_server
import pytest
import s3_server
from gcs_server import GcsServer
from s3_server import KEY_ID, SECRET, S3Server
from transfers import MIB, Stopped, left_behind, read, transfers, write

from jobs.errors import BadInput, Unavailable
from jobs.settings import Limits, Settings

NOBODY = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Kind:
    """A server's class, and settings that allow inputs under `in/` and outputs under `out/` of its bucket."""

    scheme: str
    server: Any
    storage_at: Any
    endpoint_variable: str

    def url_of(self, key: str) -> str:
        return f"{self.scheme}://{s3_server.BUCKET}/{key}"

    def settings_at(self, home: Path, endpoint: str) -> Settings:
        return Settings(home=home, storage=self.storage_at(endpoint))


S3 = Kind("s3", S3Server, s3_server.storage_at, "AWS_ENDPOINT_URL")
GCS = Kind("gs", GcsServer, gcs_server.gcs_storage, "STORAGE_EMULATOR_HOST")


@pytest.fixture(scope="module", params=[S3, GCS], ids=["s3", "gcs"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(scope="module")
def store(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = kind.server(tmp_path_factory.mktemp("store") / "log")
    yield server
    server.close()


@pytest.fixture
def settings(kind: Kind, tmp_path: Path, store: Any) -> Settings:
    return kind.settings_at(tmp_path / "home", store.url)


def assert_one_line_without_secrets(error: BaseException) -> None:
    assert not any(text in str(error) for text in (KEY_ID, SECRET, "\n"))


def test_an_object_is_read_and_one_is_written_with_progress(settings: Settings, store: Any) -> None:
    content = os.urandom(20 * MIB)
    seen: list[tuple[str, int, int]] = []
    assert read(settings, store.put("in/a.parquet", content), lambda *news: seen.append(news)) == content
    assert seen[-1] == ("downloading", len(content), len(content))
    write(settings, store.url_of("out/b.parquet"), content, lambda *news: seen.append(news))
    assert seen[-1] == ("uploading", len(content), len(content))
    assert store.get("out/b.parquet") == content
    assert left_behind(settings) == []


def test_an_empty_object_and_names_with_odd_characters(settings: Settings, store: Any) -> None:
    write(settings, store.url_of("out/ä b/+=&,.jsonl"), b"x")
    assert store.get("out/ä b/+=&,.jsonl") == b"x"
    write(settings, store.url_of("out/nothing.jsonl"), b"")
    assert store.get("out/nothing.jsonl") == b""
    assert read(settings, store.url_of("out/nothing.jsonl")) == b""


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("in/none.parquet", "no such object: correct the URL"),
        ("in/folder.parquet", "is a folder: name a file in it"),
        ("in/a.csv", "forq reads .parquet"),
        ("elsewhere/a.parquet", "under none of the roots"),
        ("in-evil/a.parquet", "under none of the roots"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(settings: Settings, store: Any, key: str, says: str) -> None:
    for other in ("in/folder.parquet/part", "elsewhere/a.parquet", "in-evil/a.parquet"):
        store.put(other, b"x")
    with pytest.raises(BadInput) as refusal:
        read(settings, store.url_of(key))
    assert says in str(refusal.value)
    assert_one_line_without_secrets(refusal.value)


def test_a_bucket_that_is_not_there_is_named(kind: Kind, settings: Settings) -> None:
    with pytest.raises(BadInput, match="there is no bucket 'no-such-bucket'"):
        read(settings, f"{kind.scheme}://no-such-bucket/none.parquet")
    with pytest.raises(BadInput, match=r"there is no bucket 'no-such-bucket'|no such object or bucket"):
        write(settings, f"{kind.scheme}://no-such-bucket/a.parquet", b"x")


def test_a_root_that_is_read_only_takes_nothing(settings: Settings, store: Any) -> None:
    with pytest.raises(BadInput, match="read only"):
        write(settings, store.url_of("in/a.parquet"), b"x")


def test_an_object_over_the_limit_is_refused_before_it_is_fetched(settings: Settings, store: Any) -> None:
    url = store.put("in/large.parquet", bytes(1001))
    small = settings.model_copy(update={"limits": Limits(max_upload_bytes=1000)})
    seen: list[int] = []
    with pytest.raises(BadInput, match=r"has 1001 bytes, the limit is 1000: split it, or raise limits\.max_upload_byt"):
        read(small, url, lambda phase, done, total: seen.append(done))
    assert seen == []


@pytest.mark.parametrize("end", ["is written again", "shrinks", "goes away"])
def test_an_object_that_changes_while_it_is_read_is_refused(settings: Settings, store: Any, end: str) -> None:
    url = store.put("in/moving.parquet", bytes(64 * MIB))
    is_first = True

    def change(phase: str, done: int, total: int) -> None:
        nonlocal is_first
        if not is_first:
            return
        is_first = False
        (transfer,) = transfers()
        transfer.suspend()
        if end == "is written again":
            store.put("in/moving.parquet", b"1" * (64 * MIB))
        elif end == "shrinks":
            store.put("in/moving.parquet", b"short")
        else:
            store.delete("in/moving.parquet")
        transfer.resume()

    with pytest.raises(BadInput, match="was written to while it was read: submit it when it is complete"):
        read(settings, url, change)
    assert left_behind(settings) == []


def test_a_write_that_is_given_up_leaves_what_was_there(settings: Settings, store: Any) -> None:
    store.put("out/kept.parquet", b"the old one")

    def stop(phase: str, done: int, total: int) -> None:
        if done >= 16 * MIB:
            raise Stopped

    with pytest.raises(Stopped):
        write(settings, store.url_of("out/kept.parquet"), bytes(40 * MIB), stop)
    assert store.get("out/kept.parquet") == b"the old one"
    assert left_behind(settings) == []
    assert transfers() == []


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_server_that_dies_in_the_middle_is_one_line(kind: Kind, tmp_path: Path, verb: str) -> None:
    server = kind.server(tmp_path / "log")
    settings = kind.settings_at(tmp_path / "home", server.url)
    url = server.put("in/a.parquet", bytes(40 * MIB))
    out = kind.url_of("out/a.parquet")

    def kill(phase: str, done: int, total: int) -> None:
        if done >= 8 * MIB and server.process.poll() is None:
            server.kill()

    with pytest.raises(Unavailable, match="its server cannot be reached") as failure:
        read(settings, url, kill) if verb == "read" else write(settings, out, bytes(40 * MIB), kill)
    assert_one_line_without_secrets(failure.value)
    assert left_behind(settings) == []
    server.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_server_that_is_not_there_is_one_line(kind: Kind, tmp_path: Path, verb: str) -> None:
    settings = kind.settings_at(tmp_path / "home", NOBODY)
    says = rf"its server cannot be reached .*{kind.endpoint_variable} or the root's endpoint_override"
    source, target = kind.url_of("in/a.parquet"), kind.url_of("out/a.parquet")
    with pytest.raises(Unavailable, match=says):
        read(settings, source) if verb == "read" else write(settings, target, b"x")
