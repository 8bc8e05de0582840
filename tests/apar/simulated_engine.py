"""vLLM's scheduling reduced to KV blocks, driven by the real admission policy: thousands of runs a second.

As in vLLM 0.32: a step serves running threads first, oldest first; each asks for a block when its path crosses into
one, and when none is free the youngest running thread is evicted, the asking one itself if it is the youngest. Only in
a step without evictions do waiting threads start. A thread that starts computes its whole path at once and samples a
token in the same step. Full blocks of a path that some running thread of the group holds are shared, blocks are freed
with their last holder; a fork takes the same blocks whether vLLM copies or recomputes them. A freed block is forgotten
at once, unlike in vLLM: the harder case for the policy.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from apar import admission
from apar.admission import PoolUse, Room, Start


@dataclass(frozen=True, slots=True)
class Script:
    """What a thread will sample."""

    num_tokens: int
    """At least 1; [Fork]s and its EOS included."""
    forks: tuple[tuple[int, "Script"], ...] = ()
    """(which of its tokens, from 1 and not the last, is [Fork]; the child's script), in order."""

    def longest_path(self, num_before: int) -> int:
        """Positions of the longest path when the thread starts behind so many."""
        children = [child.longest_path(num_before + at + 1) for at, child in self.forks]  # + 1: the injected [Child]
        return max([num_before + self.num_tokens, *children])

    def total_tokens(self) -> int:
        return self.num_tokens + sum(child.total_tokens() for _, child in self.forks)


@dataclass(frozen=True, slots=True)
class Request:
    num_prompt_tokens: int
    root: Script
    pool: str | None = None
    arrives: int = 0
    """The step before which it arrives."""
    aborted: int | None = None
    """The step before which its user gives up."""

    def longest_path(self) -> int:
        # The last token's keys and values are never computed.
        return self.root.longest_path(self.num_prompt_tokens) - 1


@dataclass(slots=True, eq=False)
class Group:
    number: int
    request: Request
    threads: list["Thread"] = field(default_factory=list)
    full_blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """(thread that owns the block's last position, index of the block in the path) -> block."""
    started: bool = False

    @property
    def alive(self) -> bool:
        return any(not thread.ended for thread in self.threads)


@dataclass(slots=True, eq=False)
class Thread:
    group: Group
    number: int
    script: Script
    num_tokens: int
    """Of its path so far."""
    parent: "Thread | None" = None
    shared: int = 0
    """Leading positions of the path that are the parent's, [Fork] included."""
    num_sampled: int = 0
    num_forks: int = 0
    num_starts: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    urgent: bool = False

    @property
    def pool(self) -> str | None:
        return self.group.request.pool

    @property
    def order(self) -> tuple[int, int]:
        return self.group.number, self.number

    @property
    def start(self) -> Start:
        if self.num_starts:
            return Start.RESUMED
        if self.parent is None:
            return Start.FRESH
        if not self.parent.running:
            return Start.RESUMED  # its block is forgotten: it can be no urgent fork
        return Start.URGENT if self.urgent else Start.FORK

    @property
    def young(self) -> bool:
        return self.parent is None and not self.num_forks and self.num_sampled < 96


@dataclass(slots=True)
class Step:
    """What one step did."""

    candidates: dict[Thread, Start] = field(default_factory=dict)
    """In line, each with what it was when the policy chose."""
    chosen: list[Thread] = field(default_factory=list)
    started: list[Thread] = field(default_factory=list)
    evicted: list[Thread] = field(default_factory=list)
    """By the engine, for want of blocks."""
    given_back: list[Thread] = field(default_factory=list)
    """By the policy, for a pool over its share."""
    gave_way: list[Thread] = field(default_factory=list)
    """For a fork of an older group, when no block was free."""
    served: list[Thread] = field(default_factory=list)
    """Those that sampled a token."""


def order(thread: Thread) -> tuple[int, int]:
    return thread.order


def line_of(thread: Thread) -> tuple[bool, tuple[int, int]]:
    """Place among the waiting: started requests first."""
    return thread.start is Start.FRESH, thread.order


class SimulatedEngine:
    def __init__(
        self,
        requests: Sequence[Request],
        num_blocks: int,
        block_size: int,
        max_running: int = 256,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        self.shares = shares or {}
        self.groups = [Group(number, request) for number, request in enumerate(requests)]
        for group in self.groups:
            group.threads.append(Thread(group, 0, group.request.root, group.request.num_prompt_tokens))
        self._to_come = sorted(self.groups, key=lambda group: group.request.arrives, reverse=True)
        self._to_abort = [group for group in self.groups if group.request.aborted is not None]
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        self._contents: dict[int, tuple[Group, tuple[int, int]]] = {}
        self.running: list[Thread] = []
        self.waiting: list[Thread] = []
        self._waiting_pools: set[str | None] = set()
        self.num_steps = self.num_evictions = self.num_recomputed = 0
        self.on_surplus: Callable[[], None] = lambda: None
        """Called when pools have given back what they held too much."""

    def steps(self) -> Iterator[Step]:
        while self._to_come or self.running or self.waiting:
            yield self.step()

    def run(self) -> "SimulatedEngine":
        for _ in self.steps():
            pass
        return self

    def step(self) -> Step:
        step = Step()
        while self._to_come and self._to_come[-1].request.arrives <= self.num_steps:
            self.waiting.append(self._to_come.pop().threads[0])
        for group in self._to_abort:
            if group.request.aborted == self.num_steps:
                self._abort(group)
        self.num_steps += 1
        self._waiting_pools = {thread.pool for thread in self.waiting}
        self.running.sort(key=order)
        self._choose(step)
        self._serve_running(step)
        if not step.evicted:
            self._start_chosen(step)
        self.num_evictions += len(step.evicted) + len(step.gave_way)
        step.served = list(self.running)
        for thread in step.served:
            self._sample(thread)
        return step

    def pools(self) -> dict[str, PoolUse]:
        uses = {pool: PoolUse(share) for pool, share in self.shares.items() if share < 1}
        held: dict[str, set[int]] = {pool: set() for pool in uses}
        for thread in self.running:
            if thread.pool in uses:
                uses[thread.pool].num_running += 1
                uses[thread.pool].num_young += thread.young
                held[thread.pool].update(thread.blocks)
        for pool, blocks in held.items():
            uses[pool].num_blocks = len(blocks)
        return uses

    def room(self) -> Room:
        num_young = sum(thread.young for thread in self.running)
        return Room(self.num_blocks, len(self.free), len(self.running), self.max_running, num_young)

    def contended(self, pool: str) -> bool:
        """Whether another pool waited when the step began: a thread that is given back in it does not count."""
        return bool(self._waiting_pools - {pool})

    def need(self, thread: Thread) -> int:
        return -(-thread.num_tokens // self.block_size) - len(self._hit(thread))

    def check(self) -> None:
        """Count again who holds what."""
        held = Counter(block for thread in self.running for block in thread.blocks)
        assert all(self.references[block] == held[block] for block in range(self.num_blocks))
        assert len(self.free) == self.num_blocks - len(held)
        assert held.keys().isdisjoint(self.free)
        assert all(not thread.blocks for group in self.groups for thread in group.threads if not thread.running)
        assert len(self.running) <= self.max_running

    def _choose(self, step: Step) -> None:
        for pool, use in self.pools().items():
            too_many = admission.surplus(self.room(), use, self.contended(pool))
            mine = [thread for thread in self.running if thread.pool == pool]
            before = len(self.free)
            while len(mine) > 1 and len(self.free) - before < too_many:
                step.given_back.append(mine.pop())
                self._evict(step.given_back[-1])
        self.on_surplus()
        self._make_way(step)
        line = [thread for thread in sorted(self.waiting, key=line_of) if thread not in step.gave_way]
        step.candidates = {thread: thread.start for thread in line}
        step.chosen = admission.admit(self.room(), step.candidates, self.need, self.pools(), self.contended)

    def _make_way(self, step: Step) -> None:
        num_free = len(self.free)
        for thread in sorted(self.waiting, key=line_of):
            thread.urgent = False
            if thread.start is not Start.FORK:
                continue
            if num_free <= 0 and not self.pools() and len(self.running) > 1:
                youngest = self.running[-1]
                if youngest.group.number <= thread.group.number:
                    continue
                num_free -= len(self.free)
                step.gave_way.append(youngest)
                self._evict(youngest)
                num_free += len(self.free)
                thread.urgent = True
            num_free -= 1

    def _serve_running(self, step: Step) -> None:
        index = 0
        while index < len(self.running):
            thread = self.running[index]
            while len(thread.blocks) * self.block_size < thread.num_tokens and not self.free:
                step.evicted.append(self.running[-1])
                self._evict(self.running[-1])
                if not thread.running:
                    return
            self._fill(thread)
            index += 1

    def _start_chosen(self, step: Step) -> None:
        for thread in step.chosen:
            hit = self._hit(thread)
            if self.need(thread) > len(self.free) or len(self.running) >= self.max_running:
                return
            for block in hit:
                self.references[block] += 1
            thread.blocks = hit
            if thread.num_starts:
                self.num_recomputed += thread.num_tokens - 1 - len(hit) * self.block_size
            self._fill(thread)
            self.waiting.remove(thread)
            self.running.append(thread)
            thread.running = thread.group.started = True
            thread.num_starts += 1
            step.started.append(thread)

    def _sample(self, thread: Thread) -> None:
        thread.num_tokens += 1
        thread.num_sampled += 1
        forks = thread.script.forks
        if thread.num_forks < len(forks) and forks[thread.num_forks][0] == thread.num_sampled:
            script = forks[thread.num_forks][1]
            thread.num_forks += 1
            threads = thread.group.threads
            child = Thread(thread.group, len(threads), script, thread.num_tokens + 1, thread, thread.num_tokens)
            threads.append(child)
            self.waiting.append(child)
        if thread.num_sampled == thread.script.num_tokens:
            self._stop(thread)

    def _hit(self, thread: Thread) -> list[int]:
        """Leading full blocks of the path that a running thread of the group holds; the last token is computed anew."""
        hit = []
        for index in range((thread.num_tokens - 1) // self.block_size):
            block = thread.group.full_blocks.get(self._content(thread, index))
            if block is None:
                break
            hit.append(block)
        return hit

    def _content(self, thread: Thread, index: int) -> tuple[int, int]:
        end = (index + 1) * self.block_size
        while thread.parent is not None and end <= thread.shared:
            thread = thread.parent
        return thread.number, index

    def _fill(self, thread: Thread) -> None:
        """Give a thread the blocks for its whole path; they are known to be free."""
        blocks = thread.blocks
        while len(blocks) * self.block_size < thread.num_tokens:
            block = self.free.pop()
            self.references[block] = 1
            blocks.append(block)
        for index in range(thread.num_tokens // self.block_size - 1, -1, -1):
            content = self._content(thread, index)
            if content in thread.group.full_blocks:
                break
            thread.group.full_blocks[content] = blocks[index]
            self._contents[blocks[index]] = thread.group, content

    def _release(self, thread: Thread) -> None:
        for block in thread.blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
                if block in self._contents:
                    group, content = self._contents.pop(block)
                    del group.full_blocks[content]
        thread.blocks = []
        thread.running = False
        self.running.remove(thread)

    def _evict(self, thread: Thread) -> None:
        self._release(thread)
        self.waiting.append(thread)

    def _stop(self, thread: Thread) -> None:
        thread.ended = True
        if thread.running:
            self._release(thread)
        elif thread in self.waiting:
            self.waiting.remove(thread)

    def _abort(self, group: Group) -> None:
        if group in self._to_come:
            self._to_come.remove(group)
        for thread in group.threads:
            self._stop(thread)
