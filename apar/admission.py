"""Which waiting threads may start now, under a fixed number of KV blocks: the whole policy, free of any engine.

The scheduler says what is free and what waits; the answer is what to admit. Three rules:

1. Order. Threads of started requests come first, oldest request first, in fork order; then requests that have not
   started. When one does not fit, nothing younger passes it; forks may pass everybody but an older fork.
2. Room. Everybody starts only if room is left for the running threads to grow into; without it the next steps would
   evict what was just admitted, and compute it twice. A fork leaves less: a moment later its parent may be gone, and
   the block to copy with it. An urgent one leaves nothing.
3. Progress. With nothing running, the first candidate always starts. As the engine evicts the youngest thread first,
   the oldest has every block of the pool to itself if it must: a pool that holds one path of `max_model_len` tokens
   finishes every request.

Pools cut across the order: while another pool waits, a pool at its share of the budget starts nothing new, and one
that has grown over its share gives threads back, youngest first. One thread of a pool may always run, however small its
share.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar


class Start(Enum):
    """How a waiting thread would start."""

    URGENT = auto()
    """A fresh child that takes the last block: its parent runs no more, but left the block to copy; or no block was
    free, and a younger request had to give way."""
    FORK = auto()
    """A fresh child whose parent runs."""
    RESUMED = auto()
    """A preempted thread, or a child that finds nothing to copy."""
    FRESH = auto()
    """A request that has not started."""

    @property
    def forks(self) -> bool:
        return self in (Start.URGENT, Start.FORK)

    def reserve(self, num_running: int, num_young: int) -> int:
        """Blocks to leave free for the running threads, of which so many are young: about to fork.

        Measured by replaying real answers (benchmarks/replay.py): more idles the pool, less evicts more. Half a block
        is what a thread has left on average; one that is about to fork will grow by a block and its children's.
        """
        if self is Start.URGENT:
            return 0
        if self is Start.FORK:
            return -(-2 * num_running // 5)
        return 2 * num_young - (-(num_running - num_young) // 2)


class Waiting(Protocol):
    @property
    def pool(self) -> str | None:
        """The pool that its blocks count for; None: no pool's."""
        ...

    @property
    def start(self) -> Start: ...

    @property
    def young(self) -> bool:
        """Whether it is about to fork once it runs."""
        ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Room:
    """The engine as admission sees it, counted in threads and KV blocks."""

    num_blocks: int
    num_free_blocks: int
    num_running: int
    max_running: int
    num_young: int = 0
    """Of the running threads, those that are about to fork."""


@dataclass(slots=True)
class PoolUse:
    """What the running threads of one pool hold."""

    share: float
    """The part of the budget it may hold while another pool waits."""
    num_blocks: int = 0
    num_running: int = 0
    num_young: int = 0

    def limit(self, room: Room) -> int:
        return int(self.share * room.num_blocks)


def admit(
    room: Room,
    waiting: Iterable[W],
    need: Callable[[W], int],
    pools: Mapping[str, PoolUse] | None = None,
    contended: Callable[[str], bool] = lambda pool: False,
    chosen_now: Callable[[W], None] = lambda candidate: None,
) -> list[W]:
    """Choose what starts in this step.

    Args:
        waiting: candidates, oldest first; read only as far as needed.
        need: blocks that a candidate takes from the free ones when it starts.
        pools: what each pool with a share below 1 holds; counted up here as candidates are chosen.
        contended: whether somebody outside the given pool waits.
        chosen_now: told of each that is chosen, before the next candidate is read.
    """
    chosen: list[W] = []
    full: set[str] = set()
    held_up = False
    free, running, young = room.num_free_blocks, room.num_running, room.num_young
    for candidate in waiting:
        start, pool = candidate.start, candidate.pool
        if running >= room.max_running or (held_up and start is Start.FRESH):
            break
        if (held_up and not start.forks) or pool in full:
            continue
        blocks = need(candidate)
        use = None if pools is None or pool is None else pools.get(pool)
        if use is not None and pool is not None and not _fits_share(room, use, blocks, start, contended(pool)):
            full.add(pool)
            continue
        if running and blocks + start.reserve(running, young) > free:
            if start is not Start.RESUMED:
                break
            held_up = True
            continue
        chosen.append(candidate)
        chosen_now(candidate)
        free -= blocks
        running += 1
        young += candidate.young
        if use is not None:
            use.num_blocks += blocks
            use.num_running += 1
            use.num_young += candidate.young
    return chosen


def _fits_share(room: Room, use: PoolUse, blocks: int, start: Start, contended: bool) -> bool:
    if not contended or not use.num_running:
        return True
    return use.num_blocks + blocks + start.reserve(use.num_running, use.num_young) <= use.limit(room)


def surplus(room: Room, use: PoolUse, contended: bool) -> int:
    """Blocks that a pool must give back now, because it has grown over its share while another pool waits."""
    return max(0, use.num_blocks - use.limit(room)) if contended and use.num_running > 1 else 0
