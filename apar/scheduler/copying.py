"""Fork by copy: a thread that starts finds more of its path in the KV cache than vLLM's look-up of full blocks does.

A running thread of the same group has the path's last, partial block, too. A hit that ends inside a block makes vLLM
copy that block for the new request: the paper's "at most one" (section 3.4.5). Without it the block is computed again.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from apar.scheduler.group import Thread

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

Hit = tuple[KVCacheBlocks, int, int, bool]
"""Of vLLM's look-up: blocks, the positions they hold, and two figures that only other kinds of attention use."""


class PartialBlocks:
    """Finds the partial block that a starting thread may copy."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._manager: KVCacheManager = scheduler.kv_cache_manager
        self._block_size: int = scheduler.block_size
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
        if not self._works or thread.parent is None:
            return hit
        # Whoever samples [Fork] has the keys and values of everything before it, but not yet of [Fork] itself.
        num_shared = thread.shared - 1
        if num_shared <= hit[1] or (holder := _holder(thread, num_shared, step)) is None:
            return hit
        held = self._manager.get_blocks(holder.request.request_id).blocks[0]
        blocks = list(held[: -(-num_shared // self._block_size)])
        return self._manager.create_kv_cache_blocks((blocks,)), num_shared, 0, False


def _holder(thread: Thread, num_positions: int, step: int) -> Thread | None:
    """A running thread of the group that has the first so many positions of this thread's path in its blocks.

    That is the parent, or a thread that branched off the parent's path at or behind this fork, or below one that did.
    One that has started in this very step is none: the copy of its own partial block is still to come.
    """
    on_path = {thread.parent}
    for other in thread.group.threads:
        if other.parent in on_path and other is not thread and other.shared > num_positions:
            on_path.add(other)
        if (
            other in on_path
            and other.running
            and other.started_step < step
            and other.request.num_computed_tokens >= num_positions
        ):
            return other
    return None
