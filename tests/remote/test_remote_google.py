"""Objects on a real server that speaks Google's API: what `test_remote_objects.py` asks of S3."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcs_server import BUCKET, GcsServer, gcs_storage
from transfers import MIB, Stopped, left_behind, read, transfers, write

from jobs.errors import BadInput, Unavailable
from jobs.settings import Limits, Settings


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path_factory.mktemp("gcs") / "log")
    yield server
    server.close()


@pytest.fixture
def settings(tmp_path: Path, gcs: GcsServer) -> Settings:
    return Settings(home=tmp_path / "home", storage=gcs_storage(gcs.url))


def url_of(key: str) -> str:
    return f"gs://{BUCKET}/{key}"


def test_an_object_is_read_and_one_is_written_with_progress(settings: Settings, gcs: GcsServer) -> None:
    content = os.urandom(20 * MIB)
    seen: list[tuple[str, int, int]] = []
    assert read(settings, gcs.put("in/a.parquet", content), lambda *news: seen.append(news)) == content
    assert seen[-1] == ("downloading", len(content), len(content))
    write(settings, url_of("out/b.parquet"), content, lambda *news: seen.append(news))
    assert seen[-1] == ("uploading", len(content), len(content))
    assert gcs.get("out/b.parquet") == content
    assert left_behind(settings) == []


def test_an_empty_object_and_names_with_odd_characters(settings: Settings, gcs: GcsServer) -> None:
    write(settings, url_of("out/ä b/+=&,.jsonl"), b"x")
    assert gcs.get("out/ä b/+=&,.jsonl") == b"x"
    write(settings, url_of("out/nothing.jsonl"), b"")
    assert gcs.get("out/nothing.jsonl") == b""
    assert read(settings, url_of("out/nothing.jsonl")) == b""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (url_of("in/none.parquet"), "no such object: correct the URL"),
        ("gs://no-such-bucket/none.parquet", "there is no bucket 'no-such-bucket'"),
        (url_of("in/folder.parquet"), "is a folder: name a file in it"),
        (url_of("elsewhere/a.parquet"), "under none of the roots"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(settings: Settings, gcs: GcsServer, url: str, says: str) -> None:
    gcs.put("in/folder.parquet/part", b"x")
    gcs.put("elsewhere/a.parquet", b"x")
    with pytest.raises(BadInput) as refusal:
        read(settings, url)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_cannot_be_written_is_refused_in_one_line(settings: Settings) -> None:
    with pytest.raises(BadInput, match="no such object or bucket: correct the URL"):
        write(settings, "gs://no-such-bucket/a.parquet", b"x")
    with pytest.raises(BadInput, match="read only"):
        write(settings, url_of("in/a.parquet"), b"x")


def test_an_object_over_the_limit_is_refused(settings: Settings, gcs: GcsServer) -> None:
    small = settings.model_copy(update={"limits": Limits(max_upload_bytes=1000)})
    with pytest.raises(BadInput, match="has 1001 bytes, the limit is 1000"):
        read(small, gcs.put("in/large.parquet", bytes(1001)))


@pytest.mark.parametrize("end", ["is written again", "shrinks", "goes away"])
def test_an_object_that_changes_while_it_is_read_is_refused(settings: Settings, gcs: GcsServer, end: str) -> None:
    url = gcs.put("in/moving.parquet", bytes(64 * MIB))
    is_first = True

    def change(phase: str, done: int, total: int) -> None:
        nonlocal is_first
        if not is_first:
            return
        is_first = False
        (transfer,) = transfers()
        transfer.suspend()
        if end == "is written again":
            gcs.put("in/moving.parquet", b"1" * (64 * MIB))
        elif end == "shrinks":
            gcs.put("in/moving.parquet", b"short")
        else:
            gcs.delete("in/moving.parquet")
        transfer.resume()

    with pytest.raises(BadInput, match="was written to while it was read: submit it when it is complete"):
        read(settings, url, change)
    assert left_behind(settings) == []


def test_a_write_that_is_given_up_leaves_what_was_there(settings: Settings, gcs: GcsServer) -> None:
    gcs.put("out/kept.parquet", b"the old one")

    def stop(phase: str, done: int, total: int) -> None:
        if done >= 16 * MIB:
            raise Stopped

    with pytest.raises(Stopped):
        write(settings, url_of("out/kept.parquet"), bytes(40 * MIB), stop)
    assert gcs.get("out/kept.parquet") == b"the old one"
    assert left_behind(settings) == []
    assert transfers() == []


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_server_that_dies_in_the_middle_is_one_line(tmp_path: Path, verb: str) -> None:
    server = GcsServer(tmp_path / "log")
    settings = Settings(home=tmp_path / "home", storage=gcs_storage(server.url))
    url = server.put("in/a.parquet", bytes(40 * MIB))

    def kill(phase: str, done: int, total: int) -> None:
        if done >= 8 * MIB and server.process.poll() is None:
            server.kill()

    with pytest.raises(Unavailable, match="its server cannot be reached") as failure:
        read(settings, url, kill) if verb == "read" else write(settings, url_of("out/a.parquet"), bytes(40 * MIB), kill)
    assert "\n" not in str(failure.value)
    assert left_behind(settings) == []
    server.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_server_that_is_not_there_is_one_line(tmp_path: Path, verb: str) -> None:
    settings = Settings(home=tmp_path / "home", storage=gcs_storage("http://127.0.0.1:9"))
    with pytest.raises(Unavailable, match="its server cannot be reached"):
        read(settings, url_of("in/a.parquet")) if verb == "read" else write(settings, url_of("out/a.parquet"), b"x")
