"""The harness's own record of what happened: one JSON line per event, appended by every process, read by the judge.

A line is one `write` to a file opened with O_APPEND, so lines of several processes never mix and a kill -9 leaves whole
lines. Times are CLOCK_MONOTONIC, which all processes of a machine share.

| event | written by | says |
|---|---|---|
| `start` | worker | its id and pid |
| `lease` | worker | a lease was taken: shard, token |
| `generated` | fake engine | an answer was computed: its sample key |
| `attempt` | worker | about to store these requests under a lease |
| `stored`, `fenced` | worker | that attempt was committed, or refused |
| `done` | worker | the shard's end was committed |
| `seam` | worker | a failpoint fired |
"""

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LeaseKey = tuple[int, int]
"""Shard id, token."""


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"at": time.monotonic(), "event": event, **facts}) + "\n").encode())


@dataclass
class History:
    """The journal as read so far."""

    path: Path
    seams: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Failpoints that fired, by the id they were armed with."""
    leases: dict[LeaseKey, tuple[str, float]] = field(default_factory=dict)
    """Lease → worker, when it was taken."""
    stored: list[tuple[float, LeaseKey]] = field(default_factory=list)
    """When a lease's rows were committed, or its shard's end."""
    ended: set[LeaseKey] = field(default_factory=set)
    generations: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Request → how often its answer was computed."""
    attempts: dict[LeaseKey, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Lease → the requests that its worker tried to store."""
    num_fenced: int = 0
    worker_ids: dict[int, str] = field(default_factory=dict)
    _offset: int = 0

    def read(self) -> None:
        """Take in what was written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        event, at = line["event"], line["at"]
        if event == "generated":
            self.generations[int(line["key"].split("-")[1])] += 1
        elif event == "start":
            self.worker_ids[line["pid"]] = line["worker"]
        elif event == "seam":
            self.seams[line["id"]] = line
        else:
            lease = (line["shard"], line["token"])
            if event == "lease":
                self.leases[lease] = (line["worker"], at)
            elif event == "attempt":
                self.attempts[lease].update(line["requests"])
            elif event in ("stored", "done"):
                self.stored.append((at, lease))
                if event == "done":
                    self.ended.add(lease)
            elif event == "fenced":
                self.num_fenced += 1

    def held_by(self, worker_id: str | None, at: float) -> set[LeaseKey]:
        """The leases a worker had at a moment that nobody has taken over before it."""
        newest: dict[int, int] = {}
        for (shard, token), (_, since) in self.leases.items():
            if since <= at:
                newest[shard] = max(token, newest.get(shard, 0))
        return {
            (shard, token)
            for (shard, token), (owner, since) in self.leases.items()
            if owner == worker_id and since <= at and newest[shard] == token and (shard, token) not in self.ended
        }

    def recovered_at(
        self, at: float, held: set[LeaseKey], continued_at: float = float("inf"), *, all_of_them: bool = False
    ) -> float | None:
        """When, after a moment, rows of the interrupted shards were committed again: of the first of them, or of the
        last. That is under a later lease or, where nobody took over from a stopped worker, under its own after it was
        continued. Without interrupted leases: when rows were committed under any lease taken since."""
        if not held:
            return next((when for when, lease in self._since(at) if self.leases.get(lease, ("", 0.0))[1] > at), None)
        left = dict(held)
        for when, (shard, token) in self._since(at):
            if shard in left and (token > left[shard] or (token == left[shard] and when > continued_at)):
                del left[shard]
                if not (all_of_them and left):
                    return when
        return None

    def taken_over_at(self, held: set[LeaseKey]) -> float | None:
        """When the first of these shards was leased again."""
        tokens = dict(held)
        later = [at for (shard, token), (_, at) in self.leases.items() if token > tokens.get(shard, token)]
        return min(later, default=None)

    def _since(self, at: float) -> list[tuple[float, LeaseKey]]:
        return [(when, lease) for when, lease in self.stored if when > at]
