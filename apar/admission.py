"""Which waiting threads may start now, under a fixed number of KV blocks: the whole policy, free of any engine.

The scheduler says what is free and what waits; the answer is what to admit. Three rules:

1. Order. Threads of started requests come first, oldest request first, in fork order; then requests that have not
   started. When one does not fit, nothing younger passes it.
2. Room. A thread starts when its blocks fit and some are left over for the running ones to grow into. Without that
   reserve the next steps would evict what was just admitted, and its tokens would be computed twice.
3. Progress. With nothing running, the first candidate always starts. As the engine evicts the youngest thread first,
   the oldest has every block of the pool to itself if it must: a pool that holds one path of `max_model_len` tokens
   finishes every request.

Pools cut across the order: while another pool waits, a pool at its share of the budget starts nothing new, and one
that has grown over its share gives threads back, youngest first. One thread of a pool may always run, however small its
share.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

STEPS_PER_BLOCK_RESERVED = 2
"""One block is kept free for every so many running threads: each asks for its next block once in `block_size` steps, so
on average it stands half a block before it."""


class Waiting(Protocol):
    @property
    def pool(self) -> str | None:
        """The pool that its blocks count for; None: no pool's."""
        ...


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


def reserve(num_running: int) -> int:
    """Blocks to leave free for `num_running` threads to grow into."""
    return -(-num_running // STEPS_PER_BLOCK_RESERVED)


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
    free, running = room.num_free_blocks, room.num_running
    for candidate in waiting:
        if running >= room.max_running:
            break
        use = None if pools is None or candidate.pool is None else pools.get(candidate.pool)
        blocks = need(candidate)
        if (
            use is not None
            and candidate.pool is not None
            and use.num_running
            and contended(candidate.pool)
            and use.num_blocks + blocks + reserve(use.num_running) > use.limit(room)
        ):
            continue
        if running and blocks + reserve(running) > free:
            break
        chosen.append(candidate)
        free -= blocks
        running += 1
        if use is not None:
            use.num_blocks += blocks
            use.num_running += 1
    return chosen


def surplus(room: Room, use: PoolUse, contended: bool) -> int:
    """Blocks that a pool must give back now, because it has grown over its share while another pool waits."""
    return max(0, use.num_blocks - use.limit(room)) if contended and use.num_running > 1 else 0
