"""The memory receipt against figures worked out by hand and against positions written down one by one."""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from apar.receipt import Holding, Receipt, distinct_positions

Path = tuple[tuple[int, int], ...]
"""Positions of a thread, each named (thread that wrote it, its place there): equal prefixes are equal positions."""


@dataclass
class Threads:
    """Threads of one request that fork at random, written down position by position."""

    branches: list[tuple[int, int]]
    paths: list[Path]

    @classmethod
    def root(cls, num_positions: int) -> "Threads":
        return cls([(0, 0)], [tuple((0, place) for place in range(num_positions))])

    def fork(self, parent: int, shared: int, num_own: int) -> None:
        number = len(self.paths)
        own = tuple((number, place) for place in range(num_own))
        self.branches.append((parent, shared))
        self.paths.append(self.paths[parent][:shared] + own)

    def cached(self, holdings: list[Holding]) -> int:
        """All positions that are held, as a set of path prefixes."""
        return len({self.paths[h.thread][: n + 1] for h in holdings for n in range(h.num_cached)})


@given(st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_distinct_positions_are_those_of_a_recount_by_sets(random: Random) -> None:
    threads = Threads.root(random.randint(1, 12))
    for _ in range(random.randint(0, 8)):
        parent = random.randrange(len(threads.paths))
        # A fork stands in the parent's own part, or anywhere: the count does not rely on it.
        shared = random.randint(random.choice([0, threads.branches[parent][1]]), len(threads.paths[parent]))
        threads.fork(parent, shared, random.randint(0, 6))
    live = [number for number in range(len(threads.paths)) if random.random() < 0.6]
    random.shuffle(live)
    # A thread that is computed again after a preemption may hold less than what it shares.
    holdings = [Holding(number, random.randint(0, len(threads.paths[number])), ()) for number in live]
    assert distinct_positions(threads.branches, holdings) == threads.cached(holdings)


@dataclass
class Live:
    number: int
    num_cached: int
    block_ids: list[int] = field(default_factory=list)


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_looking_only_when_threads_stop_finds_the_peaks_over_all_steps(random: Random) -> None:
    block_size, num_blocks = random.randint(1, 4), 0
    threads = Threads.root(40)
    receipt = Receipt(1, threads.branches)
    live, peak_cached, peak_blocks = [Live(0, random.randint(0, 4))], 0, 0
    while live:
        for thread in live:
            thread.num_cached += 1
            while len(thread.block_ids) * block_size < thread.num_cached:
                thread.block_ids.append(num_blocks)
                num_blocks += 1
        holdings = [Holding(thread.number, thread.num_cached, tuple(thread.block_ids)) for thread in live]
        peak_cached = max(peak_cached, threads.cached(holdings))
        peak_blocks = max(peak_blocks, len({block for h in holdings for block in h.block_ids}))
        stops = [thread for thread in live if random.random() < 0.1 or thread.num_cached >= 30]
        if stops:
            receipt.observe(holdings)
        for thread in list(live):
            if random.random() < 0.1 and len(threads.paths) < 12:
                threads.fork(thread.number, thread.num_cached, 40)
                full = thread.num_cached // block_size
                live.append(Live(len(threads.paths) - 1, thread.num_cached, thread.block_ids[:full]))
        live = [thread for thread in live if thread not in stops]
    assert (receipt.peak_cached_tokens, receipt.peak_blocks) == (peak_cached, peak_blocks)


# By hand. Letters are tokens, F is [Fork], C is [Child], $ is EOS.


def test_positions_shared_with_a_thread_that_has_ended_count_once() -> None:
    # Root abcdeFgh; thread 1 leaves behind F (6 positions shared), thread 2 leaves thread 1 behind its 9th.
    branches = [(0, 0), (0, 6), (1, 9)]
    assert distinct_positions(branches, [Holding(2, 12, ())]) == 12
    # The root has 8, 6 of them thread 2's too: 8 + (12 - 6).
    assert distinct_positions(branches, [Holding(0, 8, ()), Holding(2, 12, ())]) == 8 + 6
    # Thread 1 reaches 10, thread 2 shares 9 of them and has 3 more: 10 + 3.
    assert distinct_positions(branches, [Holding(1, 10, ()), Holding(2, 12, ())]) == 10 + 3
    # Computed again from the start, thread 2 has got to 4, all of them the root's.
    assert distinct_positions(branches, [Holding(0, 8, ()), Holding(2, 4, ())]) == 8
    assert distinct_positions(branches, []) == 0


def test_two_children_of_an_ended_parent_share_up_to_the_earlier_fork() -> None:
    # Children leave the root behind 5 and 8 positions and reach 10 and 11: 8 of the root's, 5 and 3 of their own.
    assert distinct_positions([(0, 0), (0, 5), (0, 8)], [Holding(1, 10, ()), Holding(2, 11, ())]) == 8 + 5 + 3


def test_a_request_without_forks() -> None:
    # Prompt of 3, answer abc$: positions 4, 5, 6, 7 are sampled, and $ is never fed.
    receipt = Receipt(3, [(0, 0)])
    receipt.sampled(3, 4)
    receipt.observe([Holding(0, 6, [4, 9])])  # blocks of 4
    assert receipt.stats(num_output_tokens=4, num_forks=0, num_steps=4) == {
        "threads": 1,
        "forks": 0,
        "max_width": 1,
        "steps": 4,
        "peak_cached_tokens": 3 + 3,
        "peak_blocks": 2,
        "attended_tokens": 4 + 5 + 6 + 7,
        "sequential_peak_tokens": 3 + 4,
        "sequential_attended_tokens": 4 + 5 + 6 + 7,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "fork_prefill_tokens": 0,
        "copied_forks": 0,
    }


def test_a_request_with_one_fork_step_by_step() -> None:
    """Prompt of 3 (ppp), root aFb$, child def$; the answer is adefb$. Blocks of 2.

    step  root samples (cached)   child samples (cached)       distinct positions
    0     a  (ppp = 3)                                         3
    1     F  (pppa = 4)                                        4
    2     b  (pppaF = 5)          d  (pppaFC = 6)              5 + C = 6
    3     $  (pppaFb = 6)         e  (pppaFCd = 7)             5 + b + Cd = 8; the root stops
    4                             f  (pppaFCde = 8)            8
    5                             $  (pppaFCdef = 9)           9
    """
    receipt = Receipt(3, [(0, 0)])
    receipt.branches.append((0, 5))  # pppaF
    receipt.max_width = 2
    receipt.copied_forks = 1
    receipt.fork_prefill_tokens = 2  # F and C
    # pp pa are blocks 0 and 1, the root goes on with Fb in 2; the child copied none of it yet: FC in 3, d in 4.
    receipt.observe([Holding(0, 6, [0, 1, 2]), Holding(1, 7, [0, 1, 3, 4])])
    assert (receipt.peak_cached_tokens, receipt.peak_blocks) == (8, 5)
    receipt.sampled(3, 4)  # a F b $ at 4 5 6 7
    receipt.observe([Holding(1, 9, [0, 1, 3, 4, 5])])
    receipt.sampled(6, 4)  # d e f $ behind pppaFC, at 7 8 9 10
    assert receipt.stats(num_output_tokens=6, num_forks=1, num_steps=6) == {
        "threads": 2,
        "forks": 1,
        "max_width": 2,
        "steps": 6,
        "peak_cached_tokens": 9,
        "peak_blocks": 5,
        "attended_tokens": (4 + 5 + 6 + 7) + (7 + 8 + 9 + 10),
        "sequential_peak_tokens": 3 + 6,
        "sequential_attended_tokens": 4 + 5 + 6 + 7 + 8 + 9,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "fork_prefill_tokens": 2,
        "copied_forks": 1,
    }


def test_a_nested_fork_counts_every_shared_part_once() -> None:
    """Prompt of 2 (pp), root aFb$, its child cFd$, the child's child e$; all run side by side.

    step  root           child              grandchild        distinct positions
    0     a (pp)                                              2
    1     F (ppa)                                             3
    2     b (ppaF)       c (ppaFC)                            4 + C = 5
    3     $ (ppaFb)      F (ppaFCc)                           4 + b + Cc = 7; the root stops
    4                    d (ppaFCcF)        e (ppaFCcFC)      7 + C = 8
    5                    $ (ppaFCcFd)       $ (ppaFCcFCe)     7 + d + Ce = 10; both stop
    """
    receipt = Receipt(2, [(0, 0), (0, 4), (1, 7)])
    receipt.observe([Holding(0, 5, [0, 1]), Holding(1, 6, [0, 2])])  # blocks of 4: ppaF is full and shared
    assert (receipt.peak_cached_tokens, receipt.peak_blocks) == (7, 3)
    receipt.observe([Holding(1, 8, [0, 2]), Holding(2, 9, [0, 3, 4])])
    assert (receipt.peak_cached_tokens, receipt.peak_blocks) == (10, 5 - 1)  # 0, 2, 3, 4
    receipt.sampled(2, 4)  # a F b $ at 3 4 5 6
    receipt.sampled(5, 4)  # c F d $ behind ppaFC, at 6 7 8 9
    receipt.sampled(8, 2)  # e $ behind ppaFCcFC, at 9 10
    assert receipt.attended_tokens == (3 + 4 + 5 + 6) + (6 + 7 + 8 + 9) + (9 + 10)


def test_what_is_computed_twice_is_counted_beside_and_changes_no_peak() -> None:
    # A root of 5 positions is preempted, computed again from the start and goes on to 7.
    receipt = Receipt(3, [(0, 0)])
    receipt.observe([Holding(0, 5, [0, 1, 2])])
    receipt.preemptions += 1
    receipt.recomputed_tokens += 5
    receipt.observe([Holding(0, 2, [7])])
    receipt.observe([Holding(0, 7, [7, 8, 9, 3])])
    stats = receipt.stats(num_output_tokens=5, num_forks=0, num_steps=5)
    assert (stats["peak_cached_tokens"], stats["peak_blocks"]) == (7, 4)
    assert (stats["preemptions"], stats["recomputed_tokens"]) == (1, 5)
