"""Threads that wait for room, oldest first, in two lines: started requests before fresh ones."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from apar.scheduler.group import Thread

_order = attrgetter("order")


class WaitingThreads:
    """Keeps the order; a thread whose request has ended meanwhile is dropped when it is met."""

    def __init__(self) -> None:
        self._started: list[Thread] = []
        self._fresh: dict[str | None, list[Thread]] = {}
        """By pool, so that a pool at its share is passed over at once, however many of its requests wait."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, thread: Thread) -> None:
        assert not thread.held
        thread.held = True
        self._num_waiting += 1
        fresh = thread.parent is None and thread.started_step == 0
        insort(self._fresh.setdefault(thread.pool, []) if fresh else self._started, thread, key=_order)

    def discard(self, thread: Thread) -> None:
        """Take a thread out of the count; its place in line goes when it is met."""
        if thread.held:
            thread.held = False
            self._num_waiting -= 1

    def remove(self, threads: list[Thread]) -> None:
        for thread in threads:
            self.discard(thread)
        if self._num_waiting == 0:
            self._started.clear()
            self._fresh.clear()

    def pools(self) -> set[str | None]:
        """Pools with somebody waiting."""
        waiting = {thread.pool for thread in self._started if thread.held}
        return waiting | {pool for pool, line in self._fresh.items() if any(thread.held for thread in line)}

    def candidates(self, most: int) -> Iterator[Thread]:
        """The next to go, in order; at most `most` of each pool's fresh requests."""
        self._started = [thread for thread in self._started if thread.held]
        yield from [thread for thread in self._started if _has_width(thread)]
        heads = []
        for line in self._fresh.values():
            gone = 0
            while gone < len(line) and not line[gone].held:
                gone += 1
            del line[:gone]
            heads.append([thread for thread in line[:most] if thread.held])
        if len(heads) == 1:
            yield from heads[0]
        else:
            yield from sorted((thread for head in heads for thread in head), key=_order)


def _has_width(thread: Thread) -> bool:
    return thread.group.num_running < thread.group.limits.max_width
