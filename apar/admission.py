"""Which waiting threads may start now, under a fixed number of KV blocks: the whole policy, free of any engine.

The scheduler says what is free and what waits; the answer is what to admit. Three rules:

1. Order. Threads of started requests come first, oldest request first, in fork order; then requests that have not
   started. When one does not fit, nothing younger passes it; forks may pass everybody but an older fork.
2. Room. A fork is the growth of a running thread: it starts at once if its block is free, for a moment later its
   parent may be gone, and the block to copy with it. Everybody else starts only if room is left for the running threads
   to grow into; without it the next steps would evict what was just admitted, and compute it twice.
3. Progress. With nothing running, the first candidate always starts. As the engine evicts the youngest thread first,
   the oldest has every block of the pool to itself if it must: a pool that holds one path of `max_model_len` tokens
   finishes every request.

Pools cut across the order: while another pool waits, a pool at its share of the budget starts nothing new, and one
that has grown over its share gives threads back, youngest first. One thread of a pool may always run, however small its
share.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar


class Start(Enum):
    """How a waiting thread would start; the value: blocks to leave free for each running thread.

    Measured by replaying real answers (benchmarks/replay.py): more than this idles the pool, less evicts more. To
    predict each thread's growth from those that have ended was no better in simulation, and is not done.
    """

    FORK = 0.0
    """A fresh child whose parent runs."""
    RESUMED = 0.5
    """A preempted thread, or a child whose parent runs no more. Half a block is what a thread has left on average."""
    FRESH = 1.0
    """A request that has not started. It will fork, and so will those that run."""

    def reserve(self, num_running: int) -> int:
        return -int(-self.value * num_running // 1)


class Waiting(Protocol):
    @property
    def pool(self) -> str | None:
        """The pool that its blocks count for; None: no pool's."""
        ...

    @property
    def start(self) -> Start: ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Room:
    """The engine as admission sees it, counted in threads and KV blocks."""

    num_blocks: int
    num_free_blocks: int
    num_running: int
    max_running: int


@dataclass(slots=True)
class PoolUse:
    """What the running threads of one pool hold."""

    share: float
    """The part of the budget it may hold while another pool waits."""
    num_blocks: int = 0
    num_running: int = 0

    def limit(self, room: Room) -> int:
        return int(self.share * room.num_blocks)


def admit(
    room: Room,
    waiting: Iterable[W],
    need: Callable[[W], int],
    pools: Mapping[str, PoolUse] | None = None,
    contended: Callable[[str], bool] = lambda pool: False,
) -> list[W]:
    """Choose what starts in this step.

    Args:
        waiting: candidates, oldest first; read only as far as needed.
        need: blocks that a candidate takes from the free ones when it starts.
        pools: what each pool with a share below 1 holds; counted up here as candidates are chosen.
        contended: whether somebody outside the given pool waits.
    """
    chosen: list[W] = []
    full: set[str] = set()
    held_up = False
    free, running = room.num_free_blocks, room.num_running
    for candidate in waiting:
        start, pool = candidate.start, candidate.pool
        if running >= room.max_running or (held_up and start is Start.FRESH):
            break
        if (held_up and start is not Start.FORK) or pool in full:
            continue
        blocks = need(candidate)
        use = None if pools is None or pool is None else pools.get(pool)
        if use is not None and pool is not None and not _fits_share(room, use, blocks, start, contended(pool)):
            full.add(pool)
            continue
        if running and blocks + start.reserve(running) > free:
            if start is not Start.RESUMED:
                break
            held_up = True
            continue
        chosen.append(candidate)
        free -= blocks
        running += 1
        if use is not None:
            use.num_blocks += blocks
            use.num_running += 1
    return chosen


def _fits_share(room: Room, use: PoolUse, blocks: int, start: Start, contended: bool) -> bool:
    if not contended or not use.num_running:
        return True
    return use.num_blocks + blocks + start.reserve(use.num_running) <= use.limit(room)


def surplus(room: Room, use: PoolUse, contended: bool) -> int:
    """Blocks that a pool must give back now, because it has grown over its share while another pool waits."""
    return max(0, use.num_blocks - use.limit(room)) if contended and use.num_running > 1 else 0
