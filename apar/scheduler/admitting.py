"""Before a step: who starts, in what order, and what a fresh child finds in the cache (fork by copy)."""

import time
from operator import attrgetter

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from apar import admission
from apar.scheduler.copying import Hit
from apar.scheduler.group import Thread
from apar.scheduler.keeping import GroupKeeping

logger = init_logger(__name__)
_order = attrgetter("order")


class Admitting(GroupKeeping):
    """`schedule` and what it calls; the policy itself is `apar.admission`."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._scheduling_step += 1
        if self.waiting:
            self._take_waiting()
        if self._unsorted:
            # The base evicts from the end.
            self.running.sort(key=self._order_of)
            self._unsorted = False
        if self._waiting_threads:
            self._make_way()
            self._admit()
        output = super().schedule(throttle_prefills)
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
            self._note_starts(output)
        return output

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running, waiting + len(self._waiting_threads)

    def _take_waiting(self) -> None:
        """Move what vLLM has queued, new and preempted requests, into our own line."""
        left = []
        while self.waiting:
            request = self.waiting.pop_request()
            thread = self._threads.get(request.request_id)
            if thread is None or self._is_blocked_waiting_status(request.status):
                left.append(request)
                continue
            self.deferred_waiting.discard(request)
            self._waiting_threads.add(thread)
        for request in left:
            self.waiting.add_request(request)

    def _admit(self) -> None:
        pools = self._pools() if self._num_sharing else {}
        waiting_pools = set(self._waiting_threads.shares()) if pools else set()

        def contended(pool: str) -> bool:
            return bool(waiting_pools - {pool})

        if any([self._shrink(name, use, contended(name)) for name, use in pools.items()]):
            pools = self._pools()
        room = self._room()
        candidates = self._waiting_threads.candidates(max(room.max_running - room.num_running, 0))
        # What this very step has preempted stays out of it: the model runner takes it for a running request still. So
        # does what this step is going to refuse.
        ready = (
            thread
            for thread in candidates
            if thread.preempted_step < self._scheduling_step
            and thread.group.request_id not in self.grammar_compile_error_reqs
        )
        chosen = self._without_split_seeds(admission.admit(room, ready, self._need, pools, contended))
        for thread in chosen:
            self._waiting_threads.discard(thread)
            self.waiting.add_request(thread.request)

    def _make_way(self) -> None:
        """Say which fresh children can wait no longer, and where no block is free for one whose parent runs, let the
        youngest thread of a younger request give its own back."""
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        for thread in self._waiting_threads.fresh_children():
            parent = thread.parent
            assert parent is not None
            thread.urgent = not parent.running and self._finds_copy(thread)
            if not parent.running and not thread.urgent:
                continue
            if num_free <= 0 and not self._num_sharing and len(self.running) > 1:
                youngest = self._threads.get(self.running[-1].request_id)
                if youngest is None or youngest.group.order <= thread.group.order:
                    continue
                self.running.pop()
                num_free -= pool.get_num_free_blocks()
                self._preempt_request(youngest.request, time.monotonic())
                num_free += pool.get_num_free_blocks()
                thread.urgent = True
            num_free -= 1
        self._take_waiting()

    def _finds_copy(self, thread: Thread) -> bool:
        num_found: int = self._get_local_prefix_cache_hit(thread.request)[1]
        return num_found >= thread.shared - 1

    def _room(self) -> admission.Room:
        self._young = {thread: None for thread in self._young if thread.running and thread.young}
        return admission.Room(
            self._num_blocks,
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(self.running),
            self.max_num_active_reqs,
            len(self._young),
        )

    def _need(self, thread: Thread) -> int:
        """Blocks that a thread would take from the free ones if it started now."""
        request = thread.request
        blocks, num_hit, *_ = self._get_local_prefix_cache_hit(request)
        num_tokens = min(request.num_tokens + self.num_lookahead_tokens, self.max_model_len)
        num_blocks: int = self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_hit,
            num_local_computed_tokens=num_hit,
            num_tokens_main_model=num_tokens,
        )
        return num_blocks

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
        self._take_waiting()
        return True

    def _without_split_seeds(self, chosen: list[Thread]) -> list[Thread]:
        """Hold back a seeded request whose prefill this step would split, where a generator cannot be wound back.

        After a part of a prefill vLLM winds a request's generator back by one draw. A CPU generator cannot do that, and
        the engine would die of it.
        """
        if not self._cannot_rewind or not self.scheduler_config.enable_chunked_prefill:
            return chosen
        if all(thread.request.sampling_params.seed is None for thread in chosen if thread.request.sampling_params):
            return chosen
        room = self.max_num_scheduled_tokens
        for request in self.running:
            room -= min(request.num_tokens - request.num_computed_tokens, room)
        kept: list[Thread] = []
        for thread in chosen:
            request = thread.request
            if thread.group.request_id in self.grammar_compile_error_reqs:
                continue
            _, num_hit, *_ = self._get_local_prefix_cache_hit(request)
            room -= request.num_tokens - num_hit
            if room < 0 and request.sampling_params is not None and request.sampling_params.seed is not None:
                if not kept and not self.running:
                    logger.warning(
                        "request %s refused: a seeded request on CPU must fit max_num_batched_tokens (%d), it has %d",
                        request.request_id,
                        self.max_num_scheduled_tokens,
                        request.num_tokens,
                    )
                    self.grammar_compile_error_reqs.add(thread.group.request_id)
                    room += request.num_tokens - num_hit
                    continue
                break
            kept.append(thread)
        return kept

    def _order_of(self, request: Request) -> tuple[int, int, int]:
        thread = self._threads.get(request.request_id)
        return (request.priority, self._arrivals, 0) if thread is None else thread.order

    def _note_starts(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        if cached.resumed_req_ids:
            starts.extend(
                (request_id, num_computed)
                for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if request_id in cached.resumed_req_ids
            )
        for request_id, num_computed in starts:
            thread = self._threads.get(request_id)
            if thread is None:
                continue
            group = thread.group
            if thread.parent is not None and thread.started_step == 0:
                prefill = thread.request.num_prompt_tokens - num_computed
                group.receipt.fork_prefill_tokens += prefill
                group.receipt.copied_forks += prefill == 2
            thread.started_step = self._scheduling_step
            thread.started_at = num_computed
            thread.running = True
            if thread.young:
                self._young[thread] = None
            group.num_running += 1
            group.receipt.max_width = max(group.receipt.max_width, group.num_running)
        self._unsorted = True

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        thread = self._threads.get(request.request_id)
        if thread is not None and thread.running:
            group = thread.group
            group.receipt.observe(self._holdings(group, in_flight=True))
            group.receipt.preemptions += 1
            thread.count_recomputed()
            thread.num_computed_before = max(thread.num_computed_before, request.num_computed_tokens)
            thread.running = False
            thread.preempted_step = self._scheduling_step
            group.num_running -= 1
            self._partial_blocks.leave(thread)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _get_local_prefix_cache_hit(self, request: Request) -> Hit:
        hit: Hit = super()._get_local_prefix_cache_hit(request)
        thread = self._threads.get(request.request_id)
        return hit if thread is None else self._partial_blocks.extend(thread, hit, self._scheduling_step)
