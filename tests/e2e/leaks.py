"""Looks for a canary, a text nobody else writes, in everything that a running service leaves or shows."""

import base64
import contextlib
import io
import re
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis
from sqlalchemy import MetaData, select

from db.session import Database

FOOTER_END = 8  # bytes: its length, and the magic number
SAMPLE_S = 0.1


class Canary:
    """One stem in all texts, and a place's name after it: what is found says where it was put in."""

    def __init__(self, stem: str) -> None:
        self.stem = stem

    def at(self, place: str) -> str:
        return f"{self.stem}-{place}"

    def found_in(self, data: bytes | str) -> list[str]:
        """The places whose canary is in here, in whatever spelling; `?` where the spelling hides which."""
        if isinstance(data, str):
            data = data.encode(errors="surrogateescape")
        plain = re.findall(re.escape(self.stem.encode()) + rb"-?([a-z_]*)", data, re.IGNORECASE)
        hidden = ["?"] if any(spelling in data for spelling in _spellings(self.stem.encode())) else []
        return sorted({place.decode() for place in plain}) + hidden


def _spellings(text: bytes) -> Iterator[bytes]:
    """Base64 at its three alignments without the characters that neighbours share, hex, and a list of tokens that are
    bytes."""
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + text)
        yield encoded[-(-8 * shift // 6) : len(encoded) - 4]
    yield text.hex().encode()
    yield ", ".join(map(str, text)).encode()


def files_below(folder: Path, *, but: Iterable[str]) -> Iterator[Path]:
    """Regular files whose path within the folder does not begin with one of `but`."""
    for path in sorted(folder.rglob("*")):
        inside = str(path.relative_to(folder))
        if path.is_file() and not any(inside == name or inside.startswith(f"{name}/") for name in but):
            yield path


def columns_with(canary: Canary, database: Database) -> set[str]:
    """`table.column` of every place in the database, whatever tables it has."""
    tables = MetaData()
    found = set()
    with database.read() as connection:
        tables.reflect(connection)
        for table in tables.sorted_tables:
            for row in connection.execute(select(table)).mappings():
                found |= {f"{table.name}.{name}" for name, value in row.items() if canary.found_in(str(value))}
    return found


def footer_of(path: Path) -> bytes:
    """A Parquet file's metadata: schema, statistics, keys and values; not its pages."""
    data = path.read_bytes()
    assert data[-4:] == b"PAR1"
    (length,) = struct.unpack("<I", data[-FOOTER_END:-4])
    return data[-FOOTER_END - length :]


class Monitor:
    """What passes through the broker, command by command, as its own MONITOR says."""

    def __init__(self, socket: Path) -> None:
        self._client = redis.Redis(unix_socket_path=str(socket))
        self._lines: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "Monitor":
        self._monitor = self._client.monitor().__enter__()
        self._thread.start()
        return self

    def _listen(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError, ValueError):
            while not self._stop.is_set():
                self._lines.append(self._monitor.next_command()["command"])

    def said(self) -> str:
        """Every command so far, and behind it the messages' bodies out of their base64."""
        text = "\n".join(self._lines)
        bodies = re.findall(r'\\*"body\\*": *\\*"([A-Za-z0-9+/=]+)', text)
        return "\n".join([text, *(base64.b64decode(body).decode() for body in bodies)])

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.ping()  # a last command, so that the listener wakes
        self._thread.join(10)
        self._client.close()


class Processes:
    """Command lines and environments of this process's children, again and again: what `ps` shows to everybody."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Processes":
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    self.seen[process.pid, line] = f"{process.name()} {line} {process.environ()}"

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


def as_parquet(table: Any) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
