"""`make audit`: pip-audit itself asks a small advisory service here."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.audit import LOCKS, Unreadable, main, pins

KNOWN = {
    ("jinja2", "3.1.2"): {
        "id": "GHSA-h5c8-rqwp-cp95",
        "aliases": ["CVE-2024-22195"],
        "summary": "HTML attribute injection",
        "affected": [
            {
                "package": {"name": "jinja2", "ecosystem": "PyPI"},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.3"}]}],
            }
        ],
    },
    ("torch", "2.9.0"): {"id": "PYSEC-2026-1", "summary": "of one build", "affected": []},
}


class Advisories(ThreadingHTTPServer):
    """Answers as https://api.osv.dev/v1/query does; `status` 0 is a service that never answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.asked: set[tuple[str, str]] = set()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/query"


class _Handler(BaseHTTPRequestHandler):
    server: Advisories

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pin = query["package"]["name"], query["version"]
        self.server.asked.add(pin)
        if self.server.status == 0:
            self.server.over.wait()
            return
        body = json.dumps({"vulns": [KNOWN[pin]]} if pin in KNOWN else {}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def advisories() -> Iterator[Advisories]:
    with Advisories() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    (tmp_path / "cpu.lock").write_text(
        "# a comment\nJinja2==3.1.2\ntorch==2.13.0+cpu\ntriton==3.7.0; platform_machine == 'never'  # a wheel\n\n"
    )
    (tmp_path / "gpu.lock").write_text("jinja2==3.1.2\ntorch==2.9.0\nhttpx[http2]==0.28.1\n")
    return tmp_path


def test_what_is_known_of_a_pin_is_told_with_its_lock_and_its_remedy(
    advisories: Advisories, locks: Path, capsys: Any
) -> None:
    assert main(["--locks", str(locks), "--osv-url", advisories.url]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "jinja2 3.1.2 (cpu.lock, gpu.lock): CVE-2024-22195 (GHSA-h5c8-rqwp-cp95), fixed in 3.1.3",
        "torch 2.9.0 (gpu.lock): PYSEC-2026-1, no fix yet",
        "5 of 5 pinned versions checked, 2 known vulnerabilities",
    ]
    # Both versions of a name, without local parts, whatever the platform.
    assert advisories.asked == {
        ("jinja2", "3.1.2"), ("torch", "2.13.0"), ("torch", "2.9.0"), ("triton", "3.7.0"), ("httpx", "0.28.1")
    }  # fmt: skip


def test_where_nothing_is_known_it_says_so(advisories: Advisories, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.lock").write_text("jinja2==3.1.6\n")
    assert main(["--locks", str(tmp_path), "--osv-url", advisories.url]) == 0
    assert capsys.readouterr().out == "1 of 1 pinned versions checked, no known vulnerabilities\n"


@pytest.mark.parametrize("trouble", ["closed", "unavailable", "silent"])
def test_a_service_without_an_answer_is_no_clean_bill_and_no_failure(
    trouble: str, advisories: Advisories, locks: Path, capsys: Any
) -> None:
    url = "http://127.0.0.1:9/v1/query" if trouble == "closed" else advisories.url
    advisories.status = {"closed": 200, "unavailable": 503, "silent": 0}[trouble]
    timeout_s = "5" if trouble == "silent" else "120"
    assert main(["--locks", str(locks), "--osv-url", url, "--timeout", timeout_s]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not checked: ")
    assert ("it has not answered within 5 s" if trouble == "silent" else "cannot be reached") in line


@pytest.mark.parametrize(
    "line", ["jinja2>=3", "jinja2==3.*", "jinja2", "-r other.lock", "jinja2 @ file:///tmp/x.whl", "="]
)
def test_a_line_that_pins_nothing_is_an_error(line: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.lock").write_text(f"torch==2.13.0\n{line}\n")
    assert main(["--locks", str(tmp_path)]) == 2
    assert f"a.lock line 2 is {line!r}" in capsys.readouterr().err
    with pytest.raises(Unreadable):
        pins([tmp_path / "a.lock"])


def test_every_line_of_the_locks_is_read() -> None:
    paths = sorted(LOCKS.glob("*.lock"))
    found = pins(paths)
    lines = [line for path in paths for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert sum(len(names) for names in found.values()) == len(lines) > 300
