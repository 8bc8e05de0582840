"""vLLM's engine loop around the real scheduler and KV cache manager, with arithmetic in the place of a model.

The model's next token is a hash of the whole path before it, and its "keys and values" are that hash, kept by physical
block and slot. So a wrong block, a copy too many or too few, a write that comes too early, and a token out of place all
show: each position that a step reads has to hold what this very path wrote there. The loop is synchronous, or schedules
a step before the one before it is done, as `EngineCore.step_with_batch_queue` does; steps may check drafted tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult
from apar.scheduler import AsyncForkingScheduler, SyncForkingScheduler
from apar.scheduler.copying import PartialBlocks

EOS, FORK, CHILD, VOCAB_SIZE = 1, 3, 4, 24
CONTROL = ControlTokens(FORK, CHILD)
BLOCK_SIZE = 4
MASK = (1 << 62) - 1


def step_hash(state: int, token: int) -> int:
    return hash((state, token)) & MASK


def state_of(path: Sequence[int]) -> int:
    state = 0
    for token in path:
        state = step_hash(state, token)
    return state


def scores(state: int, seed: int) -> list[int]:
    """Of every token of the vocabulary, after a path with this hash."""
    random = Random(state ^ seed)
    rolls = [random.randrange(1000) for _ in range(VOCAB_SIZE)]
    roll = random.random()
    if roll < 0.10:
        rolls[FORK] += 2000
    elif roll < 0.19:
        rolls[EOS] += 2000
    if random.random() < 0.1:
        rolls[CHILD] += 4000  # what must never be sampled is often the best
    return rolls


class ArithmeticModel:
    """The same model for the reference decoder. Its cache is the path's hash."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: int | None, use_cache: bool) -> Any:
        state = past_key_values or 0
        for token in input_ids[0].tolist():
            state = step_hash(state, token)
        logits = torch.tensor([[scores(state, self._seed)]], dtype=torch.float32)
        return SimpleNamespace(logits=logits, past_key_values=state)


def banned_tokens(params: Any) -> set[int]:
    biased = {token for token, bias in (params.logit_bias or {}).items() if bias < -1e9}
    return biased | {words[0] for words in params.bad_words_token_ids or []}


@dataclass
class RunnerRequest:
    tokens: list[int]
    banned: set[int]
    blocks: list[int]
    num_computed: int
    """As the runner knows it: behind the scheduler's count by rejected drafts that the scheduler has not heard of."""


@dataclass
class Runner:
    """Does with a scheduler's output what vLLM's model runner does."""

    seed: int
    num_drafts: int
    asynchronous: bool
    random: Random
    requests: dict[str, RunnerRequest] = field(default_factory=dict)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)
    """(block, slot) -> hash of the path up to and including the position that wrote it."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    num_multiple: int = 0
    """Steps in which a request got several tokens."""

    def execute(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for block in output.new_block_ids_to_zero or []:
            for slot in range(BLOCK_SIZE):
                self.cache.pop((block, slot), None)
        copies = [
            (copy.dst_block_id, slot, self.cache.get((copy.src_block_id, slot)))
            for copy in output.kv_cache_block_copies or []
            for slot in range(BLOCK_SIZE)
        ]
        for block, slot, value in copies:
            if value is None:
                self.cache.pop((block, slot), None)
            else:
                self.cache[block, slot] = value
        self._take_states(output)
        request_ids = list(output.num_scheduled_tokens)
        # All keys and values of a step are written before any is read, as a batch does per layer.
        sampled = [self._compute(request_id, output) for request_id in request_ids]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def _take_states(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = RunnerRequest(
                list(new.prompt_token_ids),
                banned_tokens(new.sampling_params),
                list(new.block_ids[0]),
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request, blocks = self.requests[request_id], cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                request.blocks = list(blocks[0])
                if cached.num_output_tokens[i] > 0:
                    request.tokens = list(cached.all_token_ids[request_id])
                request.num_computed = cached.num_computed_tokens[i]
                self.drafts.pop(request_id, None)
            elif blocks is not None:
                request.blocks += blocks[0]
            if not self.asynchronous or not self.num_drafts:
                assert cached.num_computed_tokens[i] == request.num_computed, request_id
            else:
                assert cached.num_computed_tokens[i] >= request.num_computed

    def _compute(self, request_id: str, output: Any) -> list[int]:
        request = self.requests[request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request_id) or []
        if -1 in drafts:
            drafts = (self.drafts.get(request_id) or [])[: len(drafts)]
        num_new = output.num_scheduled_tokens[request_id]
        path = [*request.tokens, *drafts]
        first = request.num_computed
        end = min(first + num_new, len(path))
        state = 0
        states = [state := step_hash(state, token) for token in path[:end]]
        for position in range(end):
            where = (request.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)
            if position < first:
                assert self.cache.get(where) == states[position], (
                    f"{request_id}: position {position} of {first} is wrong"
                )
            else:
                self.cache[where] = states[position]
        if end < len(request.tokens):
            request.num_computed = end  # a part of a prefill: nothing is sampled
            return []
        sampled: list[int] = []
        for i in range(end - len(request.tokens) + 1):
            ranked = scores(states[len(request.tokens) - 1 + i], self.seed)
            token = max((t for t in range(VOCAB_SIZE) if t not in request.banned), key=lambda t: (ranked[t], -t))
            sampled.append(token)
            if i >= len(drafts) or drafts[i] != token:
                break
        request.num_computed = len(request.tokens) + len(sampled) - 1
        request.tokens += sampled
        self.num_multiple += len(sampled) > 1
        self.drafts[request_id] = self._draft(request)
        return sampled

    def _draft(self, request: RunnerRequest) -> list[int]:
        """What comes next, more often right than not; like a real drafter's, it knows no bans."""
        path = list(request.tokens)
        drafts: list[int] = []
        for _ in range(self.num_drafts):
            ranked = scores(state_of([*path, *drafts]), self.seed)
            token = max(range(VOCAB_SIZE), key=lambda t: (ranked[t], -t))
            drafts.append(token if self.random.random() < 0.8 else self.random.randrange(VOCAB_SIZE))
        return drafts


class Pipeline:
    """One engine. `step` does one turn of its loop and returns what it has put out."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        max_model_len: int,
        seed: int,
        asynchronous: bool,
        num_drafts: int = 0,
        num_lookahead: int = 0,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        limits: ForkLimits = ForkLimits(),  # noqa: B008
        include_finished_set: bool = False,
    ) -> None:
        spec = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2} if num_drafts else None
        config = EngineArgs(
            model=str(folder), dtype="float32", block_size=32, max_model_len=max_model_len, enforce_eager=True,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory_bytes=1 << 20,
            speculative_config=spec, additional_config={"apar": {
                "fork_token_id": FORK, "child_token_id": CHILD, "max_width": limits.max_width,
                "max_forks": limits.max_forks, "max_depth": limits.max_depth,
            }},
        ).create_engine_config()  # fmt: skip
        config.cache_config.block_size = BLOCK_SIZE
        config.cache_config.num_gpu_blocks = num_blocks + 1
        config.scheduler_config.async_scheduling = asynchronous  # CpuPlatform switches it off
        layers = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        )
        cache = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[layers])
        chosen = AsyncForkingScheduler if asynchronous else SyncForkingScheduler
        self.scheduler: Any = chosen(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=False,
            include_finished_set=include_finished_set,
        )
        # As with drafters that are models: `EngineArgs` would want to load one.
        self.scheduler.num_lookahead_tokens = num_lookahead
        self.scheduler._partial_blocks = PartialBlocks(self.scheduler)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.runner = Runner(seed, num_drafts, asynchronous, Random(seed))
        self.num_blocks, self.depth = num_blocks, 2 if asynchronous else 1
        """`depth`: steps that may be scheduled before the first of them is done."""
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._limits, self._max_model_len = limits, max_model_len
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        """The last output of each request that has ended."""
        self.finished: set[str] = set()
        """The requests whose end the front end was told of, with `include_finished_set`: data parallelism counts so."""
        self.said: dict[str, Any] = {}
        """What the latest step put out."""

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        params.update_from_generation_config({}, EOS)
        self.tokens[name] = []
        self.scheduler.add_request(
            Request(
                request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
                block_hasher=self._hasher,
            )
        )  # fmt: skip

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    def step(self) -> None:
        """As `EngineCore.step` and `EngineCore.step_with_batch_queue` do."""
        self.said = {}
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            executed = output.total_num_scheduled_tokens > 0
            # The runner computes steps in the order in which they are scheduled, whenever their results are taken.
            self._queue.append((output, self.runner.execute(output)))
            if len(self._queue) < self.depth and (executed or self.scheduler.has_requests()):
                return
        scheduled, result = self._queue.popleft()
        by_client = self.scheduler.update_from_output(scheduled, result)
        if self.runner.num_drafts and self.depth == 1 and result.req_ids:
            live = [name for name in result.req_ids if name in self.runner.requests]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(live, [list(self.runner.drafts.get(name, [])) for name in live])
            )
        for outputs in by_client.values():
            self.finished |= outputs.finished_requests or set()
            for one in outputs.outputs:
                assert one.request_id in self.tokens, f"{one.request_id} is nobody's request"
                assert one.request_id not in self.ends, f"{one.request_id} has ended already"
                self.tokens[one.request_id] += one.new_token_ids
                self.said[one.request_id] = one
                if one.finish_reason is not None:
                    self.ends[one.request_id] = one

    def assert_empty(self) -> None:
        """Everything that was taken has been given back."""
        scheduler = self.scheduler
        left = {
            name: list(getattr(scheduler, name))
            for name in ("requests", "running", "waiting", "_threads", "_groups", "_touched")
        }
        assert not any(left.values()), left
        assert len(scheduler._waiting_threads) == 0
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.num_blocks

    def expected(self, prompt: list[int], limits: ForkLimits | None = None, **options: Any) -> ReferenceResult:
        decoder = ReferenceDecoder(
            ArithmeticModel(self.runner.seed), CONTROL, limits or self._limits, [EOS], self._max_model_len
        )
        return decoder.decode(prompt, **options)
