"""Fork by copy: a thread that starts finds more of its path in the KV cache than vLLM's look-up of full blocks does.

A running thread of the same group has the path's last, partial block, too, and one that has stopped left it behind in
the cache. A hit that ends inside a block makes vLLM
copy that block for the new request: the paper's "at most one" (section 3.4.5). Without it the block is computed again.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_cache_interface import FullAttentionSpec

from apar.scheduler.group import Left, Thread

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler

_numbers = count()

Hit = tuple[KVCacheBlocks, int, int, bool]
"""Of vLLM's look-up: blocks, the positions they hold, and two figures that only other kinds of attention use."""


class PartialBlocks:
    """Finds the partial block that a starting thread may copy."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._manager: KVCacheManager = scheduler.kv_cache_manager
        self._block_size: int = scheduler.block_size
        self._max_model_len: int = scheduler.max_model_len
        # A thread with a single token left to compute starts as a running one does: with its drafts, and behind them
        # the drafter's own positions.
        self._num_ahead: int = scheduler.num_lookahead_tokens + scheduler.num_spec_tokens
        # With drafts, whether a child's first token is sampled or checked would depend on when it starts.
        self._takes_fork: bool = scheduler.num_spec_tokens == 0
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._works = (
            bool(scheduler.cache_config.enable_prefix_caching)
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and groups[0].kv_cache_spec.block_size == scheduler.block_size
        )
        """A hit may end inside a block with the prefix cache on and plain attention in every layer."""

    def extend(self, thread: Thread, hit: Hit, step: int) -> Hit:
        """The ordinary look-up's result, or a longer one that ends inside a block."""
        if not self._works:
            return hit
        if thread.left is not None and self._manager.prefix_cache_lookup_enabled(thread.request):
            # At least one position has to be computed, for its logits.
            num_own = min(thread.left.num_positions, thread.request.num_tokens - 1)
            if (own := self._left(thread, thread, num_own, hit)) is not None:
                return own
        if thread.parent is None:
            return hit
        others = list(_on_path(thread))
        for other in others:
            # One that has started in this very step is none: the copy of its own partial block is still to come.
            if not other.running or other.started_step >= step:
                continue
            num_shared = self._num_shared(thread, other.request.num_computed_tokens)
            held = self._manager.get_blocks(other.request.request_id).blocks[0]
            blocks = list(held[: -(-num_shared // self._block_size)])
            if blocks and num_shared % self._block_size == 0 and blocks[-1].block_hash is None:
                num_shared -= 1  # its owner still has to register the block as a whole one: no sharing, a copy
            if num_shared > hit[1]:
                return self._manager.create_kv_cache_blocks((blocks,)), num_shared, 0, False
        for other in others:
            num_shared = 0 if other.left is None else self._num_shared(thread, other.left.num_positions)
            if num_shared > hit[1] and (left := self._left(thread, other, num_shared, hit)) is not None:
                return left
        return hit

    def _num_shared(self, thread: Thread, num_positions: int) -> int:
        """How much of a fresh child's path is there, where somebody on it has the keys and values of so many positions.

        Whoever has just sampled [Fork] has them for everything before it; for [Fork] itself a step later. 0: for less.
        """
        if num_positions < thread.shared - 1:
            return 0
        return min(num_positions, thread.shared) if self._takes_fork else thread.shared - 1

    def _left(self, thread: Thread, other: Thread, num_positions: int, hit: Hit) -> Hit | None:
        """A hit of so many positions for `thread`, whose last block `other` left and whose others are cached."""
        if other.left is None or num_positions // self._block_size * self._block_size != hit[1]:
            return None
        block = other.left.partial(num_positions, self._block_size)
        if block is None or not self._has_room_to_copy(thread, hit):
            return None
        return self._manager.create_kv_cache_blocks(([*hit[0].blocks[0], block],)), num_positions, 0, False

    def _has_room_to_copy(self, thread: Thread, hit: Hit) -> bool:
        """Whether the pool holds the thread's whole path and, beside its copy, the block that is copied.

        A path as long as the pool does not: it would never start.
        """
        num_tokens: int = min(thread.request.num_tokens + self._num_ahead, self._max_model_len)
        num_held: int = sum(block.ref_cnt > 0 for block in hit[0].blocks[0])
        num_needed = -(-num_tokens // self._block_size) - num_held + 1
        num_free: int = self._manager.block_pool.get_num_free_blocks()
        return num_needed <= num_free

    def leave(self, thread: Thread) -> None:
        """Note what a thread that is about to give its blocks back leaves, and let its partial block be kept, too."""
        if not self._works:
            return
        request = thread.request
        num_positions = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        held = self._manager.get_blocks(request.request_id).blocks[0][: -(-num_positions // self._block_size)]
        if held and held[-1].block_hash is None and held[-1].ref_cnt == 1:
            # No look-up of vLLM's finds this hash. A block that has one is reused after those that have none.
            held[-1].set_block_hash(BlockHashWithGroupId(b"left %d" % next(_numbers)))
        thread.left = Left(num_positions, [(block, block.block_hash) for block in held])

    def may_copy(self, thread: Thread) -> bool:
        """Whether the block in which a fresh child's shared path ends may still be there: a look-up would tell."""
        num_shared = thread.shared - 1
        if num_shared % self._block_size == 0:
            return True
        return any(
            other.running or (other.left is not None and other.left.partial(num_shared, self._block_size) is not None)
            for other in _on_path(thread)
        )

    def keep_longest(self, threads: Iterable[Thread]) -> None:
        """Put what these threads left behind all else that is free: they come back, and find it.

        The first one's is taken last; of each, the end before the beginning.
        """
        moved: dict[int, KVCacheBlock] = {}
        for thread in threads:
            for block, mark in thread.left.blocks if thread.left is not None else ():
                if block.ref_cnt == 0 and mark is not None and block.block_hash is mark:
                    moved.setdefault(block.block_id, block)
        blocks = list(moved.values())
        pool = self._manager.block_pool
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))


def _on_path(thread: Thread) -> Iterator[Thread]:
    """Threads of the group whose own path begins with what a child shares with its parent.

    That is the parent, and every thread that branched off the parent's path behind this fork, or below one that did.
    """
    on_path = {thread.parent}
    for other in thread.group.threads:
        if other.parent in on_path and other is not thread and other.shared > thread.shared:
            on_path.add(other)
        if other in on_path:
            yield other
