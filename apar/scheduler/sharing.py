"""What the engine and its pools hold, and what a pool gives back (a pool: threads that share a part of the budget)."""

import time
from operator import attrgetter

from apar import admission
from apar.scheduler.keeping import GroupKeeping

_order = attrgetter("order")


class Sharing(GroupKeeping):
    """The accounts that admission asks for."""

    def _room(self) -> admission.Room:
        self._young = {thread: None for thread in self._young if thread.running and thread.young}
        return admission.Room(
            self._num_blocks,
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(self.running),
            self.max_num_active_reqs,
            len(self._young),
        )

    def _pools(self) -> dict[str, admission.PoolUse]:
        """What the pools with a share below the whole budget hold, what this step adds included."""
        uses = {
            pool: admission.PoolUse(share)
            for pool, share in self._waiting_threads.shares().items()
            if pool is not None and share < 1
        }
        blocks: dict[str, set[int]] = {}
        for request in self.running:
            thread = self._threads.get(request.request_id)
            if thread is None or thread.pool is None or (share := thread.group.options.pool_share) >= 1:
                continue
            use = uses.setdefault(thread.pool, admission.PoolUse(share))
            use.num_running += 1
            use.num_young += thread.young
            held = self._block_ids(request)
            use.num_blocks += max(0, -(-request.num_tokens // self.block_size) - len(held))
            blocks.setdefault(thread.pool, set()).update(held)
        for pool, distinct in blocks.items():
            uses[pool].num_blocks += len(distinct)
        return uses

    def _shrink(self, pool: str, use: admission.PoolUse, contended: bool) -> bool:
        """Preempt a pool's youngest threads until it has given back what is over its share; one thread stays."""
        surplus = admission.surplus(self._room(), use, contended)
        if not surplus:
            return False
        threads = [self._threads.get(request.request_id) for request in self.running]
        mine = sorted((thread for thread in threads if thread and thread.pool == pool), key=_order)
        block_pool = self.kv_cache_manager.block_pool
        before = block_pool.get_num_free_blocks()
        while len(mine) > 1 and block_pool.get_num_free_blocks() - before < surplus:
            thread = mine.pop()
            self.running.remove(thread.request)
            self._preempt_request(thread.request, time.monotonic())
        return True
