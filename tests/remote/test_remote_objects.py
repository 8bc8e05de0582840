"""Objects on a real server that speaks S3: read whole or not at all, written whole or not at all, one line for each way
it can fail."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from s3_server import BUCKET, KEY_ID, SECRET, S3Server, storage_at
from transfers import MIB, read, silent, transfers, write

from jobs.errors import BadInput, ForqError, Unavailable
from jobs.remote.files import input_file, output_file
from jobs.remote.urls import parse_url
from jobs.settings import Settings


def url_of(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


def test_all_files_of_an_output_are_sent(settings: Settings, s3: S3Server) -> None:
    with output_file(settings, parse_url(url_of("out/sets/a.parquet")), silent) as path:
        path.write_bytes(b"1")
        path.with_name("a-test.parquet").write_bytes(b"2")
    assert (s3.get("out/sets/a.parquet"), s3.get("out/sets/a-test.parquet")) == (b"1", b"2")


def test_a_local_file_that_cannot_be_read_on_leaves_what_was_there(settings: Settings, s3: S3Server) -> None:
    """The child's own failure: pyarrow would complete the upload when its stream is destroyed."""
    s3.put("out/kept2.parquet", b"the old one")
    script = (
        "import os, sys; from pathlib import Path; from jobs.remote import objects, transfer\n"
        "from jobs.remote.urls import parse_url; from multiprocessing import Pipe\n"
        "from jobs.settings import get_settings\n"
        "storage = get_settings().storage; url = parse_url(sys.argv[1])\n"
        "def chunks(*_):\n"
        "    yield bytes(12 << 20)\n"
        "    raise OSError(5, 'Input/output error')\n"
        "objects._chunks = chunks\n"
        "said = ('upload', url, storage.root_of(url, to_write=True, tenant=None), storage, Path(sys.argv[0]), 0)\n"
        "transfer._run(said, dict(os.environ), Pipe()[1])\n"
    )
    path = settings.home.parent / "script.py"
    path.write_text(script)
    toml = settings.home.parent / "forq.toml"
    toml.write_text(f'[storage]\nroots = [{{url = "s3://{BUCKET}/out", endpoint_override = "{s3.url}"}}]\n')
    environment = {**os.environ, "FORQ_CONFIG": str(toml), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(path), url_of("out/kept2.parquet")], env=environment, timeout=120)
    assert done.returncode == 1
    assert s3.get("out/kept2.parquet") == b"the old one"
    unfinished = s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert "out/kept2.parquet" in [upload["Key"] for upload in unfinished], "it was sent in part"


def test_a_transfer_whose_process_is_killed_is_one_line(settings: Settings, s3: S3Server) -> None:
    url = s3.put("in/a.parquet", bytes(24 * MIB))

    def kill(phase: str, done: int, total: int) -> None:
        for transfer in transfers():
            transfer.kill()

    with pytest.raises(Unavailable, match="the transfer died"):
        read(settings, url, kill)


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, s3: S3Server) -> None:
    url = s3.put("in/a.parquet", bytes(24 * MIB))
    settings = Settings(home=tmp_path / "home", storage=storage_at(s3.url, stall_s=3.0, request_timeout_s=600))
    lock = threading.Lock()

    def stop(phase: str, done: int, total: int) -> None:
        if lock.acquire(blocking=False):
            s3.process.send_signal(signal.SIGSTOP)

    try:
        with pytest.raises(Unavailable, match=r"nothing moved for 3 s, the limit storage\.stall_s"):
            read(settings, url, stop)
    finally:
        s3.process.send_signal(signal.SIGCONT)


def assert_silent_about_secrets(error: ForqError) -> None:
    assert KEY_ID not in str(error)
    assert SECRET not in str(error)
    assert "\n" not in str(error)


def test_rights_that_are_missing_are_one_line_without_secrets(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "log", checks_credentials=True)
    settings = Settings(home=tmp_path / "home", storage=storage_at(server.url))
    for _ in range(5):  # its first requests are let in
        server.client.list_buckets()
    with pytest.raises(BadInput, match=r"denies the right to read it .*: check the credentials") as failure:
        read(settings, url_of("in/a.parquet"))
    assert_silent_about_secrets(failure.value)
    with pytest.raises(BadInput, match="denies the right to write it") as failure:
        write(settings, url_of("out/a.parquet"), b"x")
    assert_silent_about_secrets(failure.value)
    server.close()


def test_no_process_title_has_a_secret(settings: Settings, s3: S3Server) -> None:
    url = s3.put("in/a.parquet", bytes(24 * MIB))
    titles: list[str] = []

    def look(phase: str, done: int, total: int) -> None:
        with suppress(psutil.Error):  # it has just ended
            titles.extend(" ".join(child.cmdline()) for child in transfers())

    read(settings, url, look)
    assert titles
    assert not [title for title in titles if SECRET in title or KEY_ID in title]


def peak_mib(settings: Settings, s3: S3Server, num_mib: int) -> tuple[float, float]:
    """The largest resident sizes, in MiB, that a transfer's process had while it read and while it wrote."""
    url = s3.put("in/big.parquet", bytes(num_mib * MIB))
    peaks = []
    for phase in ("downloading", "uploading"):
        peak = 0.0

        def look(_phase: str, done: int, total: int) -> None:
            nonlocal peak
            with suppress(psutil.Error):
                peak = max([peak, *(child.memory_info().rss / MIB for child in transfers())])

        if phase == "downloading":
            with input_file(settings, parse_url(url), look) as path:
                assert path.stat().st_size == num_mib * MIB
        else:
            with output_file(settings, parse_url(url_of("out/big.parquet")), look) as path, path.open("wb") as file:
                for _ in range(num_mib):
                    file.write(bytes(MIB))
        peaks.append(peak)
    return peaks[0], peaks[1]


def test_a_large_object_takes_no_more_memory_than_a_small_one(settings: Settings, s3: S3Server) -> None:
    small, large = peak_mib(settings, s3, 24), peak_mib(settings, s3, 96)
    assert large[0] < small[0] + 24, "of 72 MiB more"
    assert large[1] < small[1] + 24
