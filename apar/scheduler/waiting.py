"""Threads that wait for room, oldest first, in two lines: started requests before fresh ones."""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from apar.scheduler.group import Group, Thread

_order = attrgetter("order")


class WaitingThreads:
    """Keeps the order. A thread has one place, from `add` to `discard`."""

    def __init__(self) -> None:
        self._started: list[Thread] = []
        self._fresh: dict[str | None, list[Thread]] = {}
        """By pool, so that a pool at its share is passed over at once, however many of its requests wait."""
        self._num_waiting = 0
        self._num_forks = 0
        """Of the started ones, children that have never run."""

    @property
    def num_started(self) -> int:
        """Threads of requests that have started."""
        return len(self._started)

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, thread: Thread) -> None:
        assert not thread.held
        thread.held = True
        self._num_waiting += 1
        self._num_forks += _never_ran(thread)
        insort(self._line(thread), thread, key=_order)

    def discard(self, thread: Thread) -> None:
        """Take a thread out of line, if it stands there."""
        if not thread.held:
            return
        line = self._line(thread)
        place = bisect_left(line, thread.order, key=_order)
        assert line[place] is thread
        del line[place]
        if not line and line is not self._started:
            del self._fresh[thread.pool]
        thread.held = False
        self._num_waiting -= 1
        self._num_forks -= _never_ran(thread)

    def shares(self, *, with_fresh: bool = True) -> dict[str | None, float]:
        """Pools with somebody who waits for room, and the share of each."""
        waiting = list(self.started())
        if with_fresh:
            waiting.extend(line[0] for line in self._fresh.values())
        return {thread.pool: thread.group.options.pool_share for thread in waiting}

    def fresh_children(self) -> list[Thread]:
        """Those that no more than room keeps from starting, oldest first."""
        return [thread for thread in self.started() if _never_ran(thread)] if self._num_forks else []

    def resumable(self, most: int) -> list[Thread]:
        """The first threads in line that have run before."""
        return list(islice((thread for thread in self._started if thread.started_step), most))

    def candidates(self, most: int) -> Iterator[Thread]:
        """The next to go, in order: `started`, then no more than `most` fresh ones of each pool."""
        yield from self.started()
        yield from heapq.merge(*(line[:most] for line in self._fresh.values()), key=_order)

    def started(self) -> Iterator[Thread]:
        """The next of started requests, in order: no more of a group than its width allows."""
        offered: Counter[Group] = Counter()
        for thread in self._started:
            group = thread.group
            if group.num_running + offered[group] < group.limits.max_width:
                offered[group] += 1
                yield thread

    def _line(self, thread: Thread) -> list[Thread]:
        fresh = thread.parent is None and thread.started_step == 0
        return self._fresh.setdefault(thread.pool, []) if fresh else self._started


def _never_ran(thread: Thread) -> bool:
    return thread.parent is not None and thread.started_step == 0
