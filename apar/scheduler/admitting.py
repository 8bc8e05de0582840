"""Before a step: who starts, in what order, and what a fresh child finds in the cache (fork by copy)."""

import time
from collections.abc import Iterable, Iterator, Set

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from apar import admission
from apar.scheduler.copying import Hit
from apar.scheduler.group import Thread
from apar.scheduler.sharing import Sharing

logger = init_logger(f"vllm.{__name__}")

MOST_PASSED = 1024
"""Of each pool, how many requests are looked at for one whose adapter has a place in the batch."""
MOST_KEPT = 16
"""Of the threads that wait to be resumed, how many have what they left kept longest: those that go next."""


class Admitting(Sharing):
    """`schedule` and what it calls; the policy itself is `apar.admission`."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._scheduling_step += 1
        if self.waiting or self.kv_holding_waiting:
            self._take_waiting()
        if self._unsorted:
            # The base evicts from the end.
            self.running.sort(key=self._order_of)
            self._unsorted = False
        if self._waiting_threads and self._pause_state != PauseState.PAUSED_ALL:
            if self._left_lately:
                self._partial_blocks.keep_longest(self._waiting_threads.resumable(MOST_KEPT))
                self._left_lately = False
            self._make_way()
            self._admit()
        output = super().schedule(throttle_prefills)
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
            self._note_starts(output)
        return output

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running, waiting + len(self._waiting_threads)

    def get_num_unfinished_requests(self) -> int:
        unfinished: int = super().get_num_unfinished_requests()
        if self._pause_state == PauseState.PAUSED_NEW:
            # vLLM counts none that waits, in our line or, preempted since the latest `schedule`, still in its own.
            preempted = [request for request in self.waiting if request.status == RequestStatus.PREEMPTED]
            unfinished += self._waiting_threads.num_started
            unfinished += sum(request.request_id in self._threads for request in preempted)
        return unfinished

    def _take_waiting(self) -> None:
        """Move what vLLM has queued, new and preempted requests, into our own line."""
        for queue in (self.waiting, self.kv_holding_waiting):
            left = []
            while queue:
                request = queue.pop_request()
                thread = self._threads.get(request.request_id)
                if thread is None or self._is_blocked_waiting_status(request.status):
                    left.append(request)
                    continue
                self.deferred_waiting.discard(request)
                self._waiting_threads.add(thread)
            for request in left:
                queue.add_request(request)

    def _admit(self) -> None:
        draining = self._pause_state == PauseState.PAUSED_NEW
        pools = self._pools() if self._num_sharing else {}
        waiting_pools = set(self._waiting_threads.shares(with_fresh=not draining)) if pools else set()

        def contended(pool: str) -> bool:
            return bool(waiting_pools - {pool})

        if any([self._shrink(name, use, contended(name)) for name, use in pools.items()]):
            self._take_waiting()
            pools = self._pools()
        room = self._room()
        if draining:
            # What has started shall end, and its forks are part of it. vLLM drains only this queue of its two.
            candidates, queue = self._waiting_threads.started(), self.kv_holding_waiting
        else:
            most = max(room.max_running - room.num_running, 0)
            candidates = self._waiting_threads.candidates(MOST_PASSED if most and self.lora_config else most)
            queue = self.waiting
        adapters = {request.lora_request.lora_int_id for request in self.running if request.lora_request}

        def take_place(thread: Thread) -> None:
            if thread.request.lora_request:
                adapters.add(thread.request.lora_request.lora_int_id)

        ready = self._ready(candidates, adapters)
        chosen = admission.admit(room, ready, self._need, pools, contended, take_place)
        for thread in self._without_split_seeds(chosen):
            self._waiting_threads.discard(thread)
            queue.add_request(thread.request)

    def _ready(self, candidates: Iterable[Thread], adapters: Set[int]) -> Iterator[Thread]:
        """Those that vLLM would start in this step, with these LoRA adapters in it, if there is room."""
        for thread in candidates:
            # What this very step has preempted stays out of it: the model runner takes it for a running request still.
            if thread.preempted_step >= self._scheduling_step or self._refused(thread):
                continue
            adapter = thread.request.lora_request
            if adapter and adapter.lora_int_id not in adapters and len(adapters) >= self.lora_config.max_loras:
                continue
            yield thread

    def _make_way(self) -> None:
        """Say which fresh children can wait no longer, and where no block is free for one whose parent runs, let the
        youngest thread of a younger request give its own back."""
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        for thread in self._waiting_threads.fresh_children():
            parent = thread.parent
            assert parent is not None
            thread.urgent = not parent.running and self._partial_blocks.may_copy(thread) and self._finds_copy(thread)
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

    def _need(self, thread: Thread) -> int:
        """Blocks that a thread would take from the free ones if it started now."""
        request = thread.request
        blocks, num_hit, *_ = self._get_local_prefix_cache_hit(request)
        num_ahead = self.num_lookahead_tokens + self.num_spec_tokens  # as in `PartialBlocks`
        num_tokens = min(request.num_tokens + num_ahead, self.max_model_len)
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
            if self._refused(thread):
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
                    self._refuse(thread.group.request_id)
                    room += request.num_tokens - num_hit
                    continue
                break
            kept.append(thread)
        return kept

    def _order_of(self, request: Request) -> tuple[int, int, int]:
        thread = self._threads.get(request.request_id)
        return (request.priority, self._arrivals, 0) if thread is None else thread.order

    def _get_local_prefix_cache_hit(self, request: Request) -> Hit:
        hit: Hit = super()._get_local_prefix_cache_hit(request)
        thread = self._threads.get(request.request_id)
        return hit if thread is None else self._partial_blocks.extend(thread, hit, self._scheduling_step)
