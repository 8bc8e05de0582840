"""Who is in the engine: requests become groups, threads end, and the receipt is kept. No scheduling happens here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from apar.options import EngineOptions, OptionError, RequestOptions, engine_options, request_options
from apar.receipt import Holding
from apar.scheduler.compat import check_engine, check_version, check_vocabulary
from apar.scheduler.copying import PartialBlocks
from apar.scheduler.group import Group, Thread, ban, new_group
from apar.scheduler.waiting import WaitingThreads

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Base
else:
    Base = object  # the real base stands behind us in the method resolution order

logger = init_logger(f"vllm.{__name__}")  # only what is below vllm's own is shown as it shows its lines


class GroupKeeping(Base):  # type: ignore[misc]
    """Groups and threads by request id; every way in and every way out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        check_engine(config)
        options = engine_options(
            getattr(config.model_config.hf_config, "apar", None), (config.additional_config or {}).get("apar")
        )
        self._control = options.control
        check_vocabulary(options.control, config.model_config.get_vocab_size())
        self._fork_id = -1 if options.control is None else options.control.fork
        self._limits = options.limits
        _log_options(options)
        self._eos_ids = _eos_ids(config)
        self._by_bias = self.num_spec_tokens == 0
        self._groups: dict[str, Group] = {}
        self._threads: dict[str, Thread] = {}
        """By the id of their vLLM request; only those that have not ended."""
        self._waiting_threads = WaitingThreads()
        self._arrivals = 0
        self._num_sharing = 0
        """Groups whose pool may hold a part of the budget only."""
        self._scheduling_step = 0
        self._output_step = 0
        self._unsorted = False
        self._touched: dict[Group, None] = {}
        """Groups whose threads stopped or wrote something in the step that is being processed."""
        self._young: dict[Thread, None] = {}
        """Running threads that were about to fork when they were last looked at: few, and asked for in every step."""
        self._left_lately = False
        """Whether blocks have come back since those of threads to be resumed were last put behind them."""
        self._partial_blocks = PartialBlocks(self)
        self._cannot_rewind = config.device_config.device_type == "cpu"
        num_blocks = self.cache_config.num_gpu_blocks
        assert num_blocks
        self._num_blocks = num_blocks - 1  # vLLM keeps one, the null block

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests and request.sampling_params is not None and not request.resumable:
            self._open_group(request)
        super().add_request(request)

    def _open_group(self, request: Request) -> None:
        params = request.sampling_params
        assert params is not None
        try:
            options = request_options(params.extra_args)
            limits = self._limits.lowered(options)
        except OptionError as error:
            # Raising here would end the engine for everybody: this request alone ends, with an error.
            logger.warning("request %s refused: %s", request.request_id, error)
            self._refuse(request.request_id)
            options, limits = RequestOptions(fork=False), self._limits
        may_fork = (
            self._control is not None
            and options.fork
            and limits.max_depth > 0
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.use_structured_output
        )
        if self._control is not None:
            banned = [self._control.child] if may_fork else [self._control.child, self._control.fork]
            request.sampling_params = ban(params, banned, biased=self._by_bias)
        priority = request.priority if self.policy == SchedulingPolicy.PRIORITY else 0
        group = new_group(request, (priority, self._arrivals), options, limits, may_fork)
        self._arrivals += 1
        self._groups[request.request_id] = group
        self._num_sharing += options.pool_share < 1
        self._threads[request.request_id] = group.root

    def _refuse(self, request_id: str) -> None:
        """End a request with an error after this step, as vLLM does where a grammar does not compile."""
        self.grammar_compile_error_reqs.add(request_id)

    def _refused(self, thread: Thread) -> bool:
        return thread.group.request_id in self.grammar_compile_error_reqs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        wanted = list(self.requests if request_ids is None else dict.fromkeys(request_ids))
        if request_ids is None:
            wanted.extend(group_id for group_id in self._groups if group_id not in self.requests)
        groups = [self._groups[request_id] for request_id in wanted if request_id in self._groups]
        ids = [request_id for request_id in wanted if request_id not in self._threads]
        for group in groups:
            ids.extend(thread.request.request_id for thread in group.threads if not thread.finished)
        finished = super().finish_requests(ids, finished_status)
        others = [request for request in finished if request.request_id not in self._threads]
        for group in groups:
            # The root thread may have ended well long ago; its request has not.
            group.root.request.status = finished_status
            if self.finished_req_ids_dict is not None:  # `_free_request` hides threads, and with them the request
                self.finished_req_ids_dict[group.root.request.client_index].add(group.request_id)
            self._forget(group)
        # Callers speak of requests: children are none.
        return [*others, *(group.root.request for group in groups)]

    def _forget(self, group: Group) -> None:
        if self._groups.pop(group.request_id, None) is None:
            return
        self._num_sharing -= group.options.pool_share < 1
        for thread in group.threads:
            self._threads.pop(thread.request.request_id, None)
        self._touched.pop(group, None)

    # A thread's starts and stops

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
                group.receipt.copied_forks += prefill <= 2
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
            self._left_lately = True
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        thread = self._threads.get(request.request_id)
        if thread is not None:
            self._leave(thread)
        freed: tuple[dict[str, Any] | None, dict[str, Any] | None]
        freed = super()._free_request(request, delay_free_blocks)
        if thread is not None and self.finished_req_ids_dict is not None and thread.group.tree is not None:
            # The front end hears of requests, and of each when all its threads are done.
            self.finished_req_ids_dict[request.client_index].discard(request.request_id)
        return freed

    def _leave(self, thread: Thread) -> None:
        """Take a thread that has ended out of the accounts, and make its own blocks the first to be used again."""
        group, request = thread.group, thread.request
        thread.finished = True
        self._waiting_threads.discard(thread)
        group.receipt.sampled(request.num_prompt_tokens, request.num_output_tokens)
        self._touched[group] = None
        if not thread.running:
            return
        thread.count_recomputed()
        thread.running = False
        self._left_lately = True
        group.num_running -= 1
        group.leaving.append(self._holding(thread))
        if any(other.parent is thread and other.fresh_child for other in group.threads):
            self._partial_blocks.leave(thread)
        if group.tree is not None:
            self._evict_own_blocks(thread)

    def _evict_own_blocks(self, thread: Thread) -> None:
        """Drop from the prefix cache what no thread will ever ask for: others' prefixes stay in it longer."""
        keep = thread.shared if thread.parent is not None else thread.request.num_prompt_tokens
        for other in thread.group.threads:
            branch: Thread | None = None if other.finished else other
            while branch is not None and branch.parent is not thread:
                branch = branch.parent
            if branch is not None:
                keep = max(keep, branch.shared)
        first = -(-keep // self.block_size)
        blocks = self.kv_cache_manager.get_blocks(thread.request.request_id).blocks
        own = {
            block.block_id for group in blocks for block in group[first:] if block.ref_cnt == 1 and not block.is_null
        }
        if own:
            self.kv_cache_manager.evict_blocks(own)

    # Accounts

    def _block_ids(self, request: Request) -> list[int]:
        return [block for group in self.kv_cache_manager.get_block_ids(request.request_id) for block in group]

    def _holding(self, thread: Thread, in_flight: bool = False) -> Holding:
        request = thread.request
        num_cached = request.num_computed_tokens - (0 if in_flight else request.num_in_flight_tokens)
        ids = self.kv_cache_manager.get_block_ids_for_computed_tokens(request.request_id, num_cached)
        return Holding(thread.number, num_cached, [block for group in ids for block in group])

    def _holdings(self, group: Group, in_flight: bool = False) -> list[Holding]:
        return [self._holding(thread, in_flight) for thread in group.threads if thread.running]


def _log_options(options: EngineOptions) -> None:
    if options.control is None:
        logger.info("no request forks: neither config.json nor additional_config names control tokens under apar")
    else:
        logger.info("requests fork: %s, %s", options.control, options.limits)


def _eos_ids(config: Any) -> frozenset[int]:
    """Token ids by which the model itself ends an answer, beside the tokenizer's EOS."""
    said = (config.model_config.try_get_generation_config() or {}).get("eos_token_id")
    named = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    ids: set[int] = set()
    for value in (said, named):
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
