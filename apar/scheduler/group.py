"""A sequence group and its threads, as the scheduler keeps them: vLLM requests here, the paragraph tree there.

The root thread is the request that came in, under its own id. Every child is an ordinary vLLM `Request` whose prompt is
its parent's path through [Fork] and the injected [Child].

Source: APAR paper, section 3.4.5 (sequence group, Algorithm 1).
"""

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from apar.admission import Start
from apar.options import ControlTokens, ForkLimits, RequestOptions, child_seed
from apar.receipt import Holding, Receipt, attended
from apar.tree import Node, ParagraphTree, Span

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

RECEIPT_VERSION = 1
YOUNG_TOKENS = 96
"""A root thread that has not forked by then will hardly do so."""
CHILD_ID = "{root}#thread{number}"


@dataclass(frozen=True, slots=True)
class Left:
    """What a thread that stopped left in the free part of the cache, until somebody else takes the blocks."""

    num_positions: int
    blocks: "list[tuple[KVCacheBlock, BlockHashWithGroupId | None]]"
    """Each with its hash at that time. A block that is taken loses that object, and with it this entry its worth."""

    def partial(self, num_positions: int, block_size: int) -> "KVCacheBlock | None":
        """The block in which so many positions end, if it still holds them."""
        if num_positions > self.num_positions or num_positions % block_size == 0:
            return None
        block, mark = self.blocks[num_positions // block_size]
        return block if mark is not None and block.block_hash is mark else None


@dataclass(slots=True, eq=False)
class Thread:
    """One decoding branch."""

    number: int
    group: "Group"
    request: Request
    parent: "Thread | None" = None
    shared: int = 0
    """Path length shared with the parent, [Fork] included."""
    depth: int = 0
    node: Node | None = None
    """The node it writes; None until the group has a tree."""
    num_children: int = 0
    held: bool = False
    """Waits in the scheduler's own queue."""
    running: bool = False
    finished: bool = False
    started_step: int = 0
    """Scheduler step of its latest start; 0 before the first."""
    started_at: int = 0
    """Positions found in the cache at its latest start."""
    preempted_step: int = 0
    """Scheduler step of its latest preemption."""
    urgent: bool = False
    """Waits to be forked and can wait no longer (see `admission.Start`); said anew before each admission."""
    left: "Left | None" = None
    """What it left in the cache when it ran last."""
    num_computed_before: int = 0
    """Positions whose keys and values had been computed before the latest preemption."""

    order: tuple[int, int, int] = field(init=False)
    """Who goes first: the older group, then the earlier fork."""

    def __post_init__(self) -> None:
        self.order = (*self.group.order, self.number)

    @property
    def start(self) -> Start:
        if self.started_step:
            return Start.RESUMED
        if self.parent is None:
            return Start.FRESH
        if self.urgent:
            return Start.URGENT
        return Start.FORK if self.parent.running else Start.RESUMED

    @property
    def fresh_child(self) -> bool:
        """Whether it was forked and has never run."""
        return self.parent is not None and self.started_step == 0 and not self.finished

    @property
    def young(self) -> bool:
        """Whether it is about to fork."""
        return (
            self.parent is None
            and self.num_children == 0
            and self.group.may_fork
            and self.request.num_output_tokens < YOUNG_TOKENS
        )

    @property
    def pool(self) -> str | None:
        return self.group.options.pool

    @property
    def num_recomputed(self) -> int:
        """Positions computed a second time since the latest start; 0 unless it runs."""
        again = min(self.request.num_computed_tokens, self.num_computed_before) - self.started_at
        return max(0, again) if self.running else 0

    def count_recomputed(self) -> None:
        """Take `num_recomputed` into the receipt; call when the thread stops."""
        self.group.receipt.recomputed_tokens += self.num_recomputed


@dataclass(slots=True, eq=False)
class Group:
    """All threads of one request."""

    order: tuple[int, int]
    """(priority, arrival): smaller goes first."""
    options: RequestOptions
    limits: ForkLimits
    may_fork: bool
    receipt: Receipt
    sends_receipts: bool
    """Attach the receipt to every output: with stop strings the front end may end the request at any of them."""
    max_tokens: int
    threads: list[Thread] = field(default_factory=list)
    tree: ParagraphTree | None = None
    """None until the first fork: a request that never forks takes vLLM's own way."""
    first_step: int | None = None
    last_step: int = 0
    num_running: int = 0
    leaving: list[Holding] = field(default_factory=list)
    """What threads that stopped in this step held."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Fields of the root's outputs that wait for the next output that is sent."""
    _reported: list[list[Any]] = field(default_factory=list)
    """The nodes that no later report changes, as they travel."""

    @property
    def root(self) -> Thread:
        return self.threads[0]

    @property
    def request_id(self) -> str:
        request_id: str = self.root.request.request_id
        return request_id

    def sampled_in(self, step: int) -> None:
        """Note an engine step that sampled a token of this group."""
        if self.first_step is None:
            self.first_step = step
        self.last_step = step

    def plant(self, num_emitted: int) -> ParagraphTree:
        """Start the tree at the first fork, with what the root thread has put out in earlier steps."""
        self.tree = ParagraphTree(self.max_tokens, self.limits.max_forks)
        self.root.node = self.tree.root
        self.tree.already_emitted(num_emitted, self.first_step, self.last_step)
        return self.tree

    def report(self, num_output_tokens: int) -> dict[str, Any]:
        """The receipt and the tree, as they travel in `kv_transfer_params["apar"]`."""
        first = self.first_step or 0
        steps = self.last_step - first + 1 if self.first_step is not None else 0
        if self.tree is None:
            nodes = [[0, None, "root", 0, 0, num_output_tokens, 0, max(steps - 1, 0)]]
        else:
            nodes = self._nodes(self.tree.spans(), first)
        num_forks = 0 if self.tree is None else self.tree.num_forks
        stats = self.receipt.stats(num_output_tokens, num_forks, steps)
        for thread in self.threads:
            if not thread.finished:  # the front end may end the answer here, and hear nothing later
                own = thread.request.num_output_tokens
                stats["attended_tokens"] += attended(thread.request.num_prompt_tokens, own)
                stats["recomputed_tokens"] += thread.num_recomputed
        return {"version": RECEIPT_VERSION, "stats": stats, "nodes": nodes}

    def _nodes(self, spans: list[Span], first: int) -> list[list[Any]]:
        """With steps from the group's first one."""
        last = spans[-1]
        for span in spans[len(self._reported) : -1]:
            self._reported.append(_relative(span, first))
        return [*self._reported, _relative(last, first)]


def _relative(span: Span, first: int) -> list[Any]:
    return list(span._replace(first_step=span.first_step - first, last_step=span.last_step - first))


def new_group(
    request: Request, order: tuple[int, int], options: RequestOptions, limits: ForkLimits, may_fork: bool
) -> Group:
    params = request.sampling_params
    assert params is not None
    receipt = Receipt(request.num_prompt_tokens, [(0, 0)])
    group = Group(order, options, limits, may_fork, receipt, bool(params.stop), request.max_tokens)
    group.threads.append(Thread(0, group, request))
    return group


def fork(
    thread: Thread, path_length: int, control: ControlTokens, detail: Node, *, biased: bool, hash_block_size: int
) -> Thread:
    """Make the child thread of a [Fork] that stands at the end of the first `path_length` tokens of `thread`'s path.

    Source: Algorithm 1, lines 20-29.
    """
    group, parent = thread.group, thread.request
    child = Thread(len(group.threads), group, parent, thread, path_length, thread.depth + 1, detail)
    params = _child_params(thread, child, control, biased)
    request = Request(
        request_id=CHILD_ID.format(root=group.request_id, number=child.number),
        prompt_token_ids=[*parent.all_token_ids[:path_length], control.child],
        sampling_params=params,
        pooling_params=None,
        client_index=parent.client_index,
        # A later fork is the earlier victim under priority scheduling, too.
        arrival_time=group.root.request.arrival_time + child.number * 1e-6,
        mm_features=parent.mm_features or None,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        priority=parent.priority,
    )
    request.max_tokens = max(1, group.max_tokens - detail.before)
    hasher = parent._block_hasher
    if hasher is not None and parent.block_hashes:
        # The hashes of shared full blocks are the parent's: only what follows is hashed anew.
        request.block_hashes = parent.block_hashes[: path_length // hash_block_size]
    request._block_hasher = hasher
    request.update_block_hashes()
    child.request = request
    thread.num_children += 1
    group.threads.append(child)
    group.receipt.branches.append((thread.number, path_length))
    return child


def ban(params: "SamplingParams", token_ids: list[int], *, biased: bool) -> "SamplingParams":
    """A copy of sampling parameters under which these tokens are never sampled, at any temperature.

    A logit bias of minus infinity is one vectorised addition per step; speculative decoding refuses logit biases, and
    gets bad words instead.
    """
    banned = copy.copy(params)
    if biased:
        banned.logit_bias = {**(params.logit_bias or {}), **dict.fromkeys(token_ids, -math.inf)}
    else:
        words = list(params.bad_words_token_ids or [])
        banned._bad_words_token_ids = words + [[token] for token in token_ids if [token] not in words]
    return banned


def _child_params(thread: Thread, child: Thread, control: ControlTokens, biased: bool) -> "SamplingParams":
    params = thread.request.sampling_params
    assert params is not None
    if child.depth >= thread.group.limits.max_depth:
        params = ban(params, [control.fork], biased=biased)
    else:
        params = copy.copy(params)
    params.prompt_logprobs = None  # the prompt's belong to the root
    params.min_tokens = 0  # a lower bound on the answer, which the root thread alone keeps
    if params.seed is not None:
        params.seed = child_seed(params.seed, thread.num_children)
    return params
