"""The admission policy, rule by rule, and inside simulated engines that run random workloads to their end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import Group, Request, Script, SimulatedEngine, Step, Thread

from apar import admission
from apar.admission import PoolUse, Room, admit, reserve, surplus

POOLS = ("first", "second")


@dataclass(frozen=True)
class Candidate:
    name: str
    need: int
    pool: str | None = None


def admitted(
    room: Room, candidates: list[Candidate], pools: Mapping[str, PoolUse] | None = None, *, contended: bool = True
) -> str:
    """Names of who may start, joined."""
    chosen = admit(room, candidates, lambda candidate: candidate.need, pools, lambda pool: contended)
    return "".join(candidate.name for candidate in chosen)


# Rule by rule


def test_nothing_younger_passes_a_thread_that_does_not_fit() -> None:
    room = Room(num_blocks=20, num_free_blocks=6, num_running=1, max_running=9)
    assert admitted(room, [Candidate("a", 2), Candidate("b", 4), Candidate("c", 1)]) == "a"


def test_a_thread_starts_only_when_the_reserve_stays_free() -> None:
    # 3 run: ceil(3 / 2) = 2 blocks stay free; 4 run with the first candidate: 2 again; then ceil(5 / 2) = 3.
    room = Room(num_blocks=20, num_free_blocks=7, num_running=3, max_running=9)
    assert reserve(3) == 2
    assert admitted(room, [Candidate("a", 5)]) == "a"
    assert admitted(room, [Candidate("a", 6)]) == ""
    assert admitted(room, [Candidate("a", 2), Candidate("b", 3), Candidate("c", 1)]) == "ab"
    assert admitted(room, [Candidate("a", 1), Candidate("b", 2), Candidate("c", 1)]) == "abc"


def test_with_nothing_running_the_first_starts_even_in_the_last_block() -> None:
    room = Room(num_blocks=4, num_free_blocks=4, num_running=0, max_running=9)
    assert admitted(room, [Candidate("a", 4), Candidate("b", 1)]) == "a"
    # Even if its need is put too high: nobody else would ever free a block for it.
    assert admitted(room, [Candidate("a", 5), Candidate("b", 1)]) == "a"


def test_no_more_run_than_the_engine_takes() -> None:
    room = Room(num_blocks=90, num_free_blocks=80, num_running=2, max_running=4)
    assert admitted(room, [Candidate(name, 1) for name in "abc"]) == "ab"
    assert admitted(Room(90, 80, 4, 4), [Candidate("a", 1)]) == ""


def test_candidates_are_read_and_measured_only_as_far_as_needed() -> None:
    read: list[str] = []

    def line() -> Iterator[Candidate]:
        for name in "abcd":
            read.append(name)
            yield Candidate(name, 5)

    assert [c.name for c in admit(Room(20, 7, 1, 9), line(), lambda c: c.need)] == ["a"]
    assert read == ["a", "b"]


def test_a_pool_at_its_share_starts_nothing_while_another_waits() -> None:
    # Share: 0.5 of 20 = 10 blocks. It holds 6, a candidate takes 3 and one running thread reserves 1: 10 in all.
    room, line = Room(20, 14, 1, 9), [Candidate("a", 3, "first"), Candidate("b", 1, "first"), Candidate("c", 1)]
    assert admitted(room, line, {"first": PoolUse(0.5, 6, 1)}) == "ac"
    assert admitted(room, line, {"first": PoolUse(0.5, 7, 1)}) == "c"
    assert admitted(room, line, {"first": PoolUse(0.5, 7, 1)}, contended=False) == "abc"


def test_nothing_younger_of_a_pool_passes_a_thread_that_its_share_has_no_room_for() -> None:
    # Otherwise short threads of a job could keep a long one from ever starting.
    line = [Candidate("a", 5, "first"), Candidate("b", 1, "first"), Candidate("c", 1)]
    assert admitted(Room(20, 14, 1, 9), line, {"first": PoolUse(0.5, 6, 1)}) == "c"


def test_one_thread_of_a_pool_may_run_however_small_its_share() -> None:
    line = [Candidate("a", 5, "first"), Candidate("b", 1, "first")]
    assert admitted(Room(20, 14, 1, 9), line, {"first": PoolUse(0.01)}) == "a"


def test_a_pool_gives_back_what_it_holds_beyond_its_share_unless_one_thread_holds_it() -> None:
    room = Room(20, 6, 3, 9)
    assert surplus(room, PoolUse(0.5, 14, 3), contended=True) == 4
    assert surplus(room, PoolUse(0.5, 10, 3), contended=True) == 0
    assert surplus(room, PoolUse(0.5, 14, 3), contended=False) == 0
    assert surplus(room, PoolUse(0.5, 14, 1), contended=True) == 0


# In an engine


def longest_path(requests: list[Request], block_size: int) -> int:
    """Blocks without which no policy could end these requests."""
    return max(-(-request.longest_path() // block_size) for request in requests)


def random_script(random: Random, max_tokens: int, max_forks: int, depth: int = 2) -> Script:
    """Threads of 1 to `max_tokens` tokens, nested at most `depth` deep; about half of them fork."""
    num_tokens = random.randint(1, max_tokens)
    forks: list[tuple[int, Script]] = []
    if depth and num_tokens > 1 and max_forks and random.random() < 0.6:
        places = random.sample(range(1, num_tokens), min(num_tokens - 1, random.randint(1, max_forks)))
        forks = [(at, random_script(random, max_tokens, max_forks, depth - 1)) for at in sorted(places)]
    return Script(num_tokens, tuple(forks))


def random_engine(random: Random) -> SimulatedEngine:
    """A small workload under a budget between the least possible and plenty."""
    has_pools = random.random() < 0.5
    requests = [
        Request(
            num_prompt_tokens=random.randint(1, 8),
            root=random_script(random, max_tokens=10, max_forks=3),
            pool=random.choice([*POOLS, None]) if has_pools else None,
            arrives=random.randint(0, 12) if random.random() < 0.3 else 0,
            aborted=random.randint(0, 20) if random.random() < 0.1 else None,
        )
        for _ in range(random.randint(1, 5))
    ]
    block_size = random.randint(1, 4)
    num_blocks = longest_path(requests, block_size) + random.choice([0, 0, 1, 2, 4, 8])
    shares = {pool: random.uniform(0.01, 1) for pool in POOLS} if has_pools else {}
    return SimulatedEngine(requests, num_blocks, block_size, random.choice([1, 2, 4, 256]), shares)


def run_checked(engine: SimulatedEngine) -> None:
    """Run to the end under every promise that the policy makes."""
    total = sum(group.request.root.total_tokens() for group in engine.groups)
    latest = max(group.request.arrives for group in engine.groups)
    engine.on_surplus = lambda: check_shares(engine)
    while True:
        running = sorted(engine.running, key=lambda thread: thread.order)
        started = [group for group in engine.groups if group.started and group.alive]
        aborted = [group for group in engine.groups if group.request.aborted == engine.num_steps]
        step = next(engine.steps(), None)
        if step is None:
            break
        engine.check()
        check_order(engine, step)
        check_progress(step, [t for t in running if t.group not in aborted], [g for g in started if g not in aborted])
        assert engine.num_steps <= total + latest + 1, "every step with anybody there samples a token"
    assert len(engine.free) == engine.num_blocks
    for group in engine.groups:
        assert not group.alive
        for thread in group.threads:
            assert thread.num_sampled == thread.script.num_tokens or group.request.aborted is not None
            assert thread.num_starts <= thread.num_sampled, "no start is in vain"


def check_shares(engine: SimulatedEngine) -> None:
    for pool, use in engine.pools().items():
        if engine.contended(pool) and use.num_running > 1:
            assert use.num_blocks <= use.share * engine.num_blocks


def check_order(engine: SimulatedEngine, step: Step) -> None:
    """Threads start in line; who is passed over belongs to a pool that others wait for, and nobody of it starts."""
    line = iter(step.candidates)
    assert all(any(other is chosen for other in line) for chosen in step.chosen), "chosen in line"
    if not step.chosen:
        return
    last = step.candidates.index(step.chosen[-1])
    passed = [thread for thread in step.candidates[:last] if thread not in step.chosen]
    for thread in passed:
        assert engine.shares.get(thread.pool or "", 1) < 1
        assert thread.pool is not None
        assert engine.contended(thread.pool)
        behind = step.candidates[step.candidates.index(thread) :]
        assert not any(other in step.chosen for other in behind if other.pool == thread.pool)


def check_progress(step: Step, running: list[Thread], started: list[Group]) -> None:
    if running or step.candidates:
        assert step.served
    if running:
        assert running[0] in step.served, "the oldest running thread keeps its blocks and goes on"
    if started and not any(thread.group is started[0] for thread in step.served):
        # The oldest group waits for younger ones to end: none of its pool, or of no pool, has passed it.
        waiting = next(thread for thread in step.candidates if thread.group is started[0])
        assert running
        assert not [t for t in step.started if t.pool == waiting.pool]


@given(st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_every_workload_ends_in_order_within_its_blocks(random: Random) -> None:
    run_checked(random_engine(random))


def test_twenty_thousand_workloads_end_in_order_within_their_blocks() -> None:
    num_evictions = num_tokens = 0
    for seed in range(20_000):
        engine = random_engine(Random(seed))
        try:
            run_checked(engine)
        except AssertionError as error:
            raise AssertionError(f"with seed {seed}") from error
        num_evictions += engine.num_evictions
        num_tokens += sum(thread.num_sampled for group in engine.groups for thread in group.threads)
    assert 0 < num_evictions < num_tokens / 25


def test_threads_that_all_need_a_block_in_the_same_step_end_in_the_least_budget() -> None:
    requests = [Request(4, Script(21)) for _ in range(8)]  # every path crosses into a block in the same steps
    run_checked(SimulatedEngine(requests, longest_path(requests, 4), 4))


def test_a_burst_of_forks_ends_in_the_least_budget() -> None:
    leaf = Script(9)
    branch = Script(20, tuple((at, leaf) for at in range(1, 20)))
    requests = [Request(3, Script(20, tuple((at, branch) for at in range(1, 20))))]
    for block_size in (1, 4, 7):
        engine = SimulatedEngine(requests, longest_path(requests, block_size), block_size)
        run_checked(engine)
        assert len(engine.groups[0].threads) == 1 + 19 + 19 * 19


def test_a_child_that_starts_late_is_evicted_after_younger_requests() -> None:
    requests = [Request(6, Script(4, ((1, Script(12)),))), Request(2, Script(14))]
    engine = SimulatedEngine(requests, num_blocks=10, block_size=2)
    victims = [thread.group.number for step in engine.steps() for thread in step.evicted]
    assert victims
    assert set(victims) == {1}


def test_a_pool_that_filled_the_budget_alone_makes_room_when_another_comes() -> None:
    requests = [Request(4, Script(40), "first") for _ in range(8)] + [Request(4, Script(40), "second", arrives=6)]
    engine = SimulatedEngine(requests, num_blocks=40, block_size=2, shares={"first": 0.5, "second": 0.5})
    late = engine.groups[8].threads[0]
    waited = 0
    for step in engine.steps():
        waited += late in step.candidates and late not in step.started
        if late in step.started:
            break
    assert waited <= 1
    assert engine.pools()["first"].num_blocks <= 20 + engine.pools()["first"].num_running
    run_checked(engine)


def test_a_share_below_one_block_still_lets_a_pool_end_its_requests() -> None:
    requests = [Request(5, Script(9), pool) for pool in (*POOLS, *POOLS)]
    run_checked(SimulatedEngine(requests, longest_path(requests, 2), 2, shares=dict.fromkeys(POOLS, 0.01)))


def test_an_abort_of_the_oldest_request_lets_the_next_one_go_on() -> None:
    requests = [Request(4, Script(30, ((1, Script(30)),)), aborted=7), Request(4, Script(30)), Request(4, Script(30))]
    run_checked(SimulatedEngine(requests, longest_path(requests, 2), 2))


def answers_like_the_papers(num_requests: int) -> list[Request]:
    """Prompts of 26 tokens, answers of about 300 in about 5 threads; one in five does not fork (Vicuna Bench)."""
    random = Random(0)
    requests = []
    for _ in range(num_requests):
        at, forks = random.randint(10, 40), []
        for _ in range(random.randint(2, 8) if random.random() < 0.8 else 0):
            forks.append((at, Script(random.randint(15, 60))))
            at += random.randint(5, 15)
        requests.append(
            Request(26, Script(at + random.randint(1, 60) if forks else random.randint(100, 400), tuple(forks)))
        )
    return requests


@pytest.mark.parametrize("num_blocks", [36, 60, 120])
def test_without_the_reserve_threads_are_evicted_much_more_often(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = answers_like_the_papers(80)
    with_reserve = SimulatedEngine(requests, num_blocks, 32).run()
    monkeypatch.setattr(admission, "reserve", lambda num_running: 0)
    without = SimulatedEngine(requests, num_blocks, 32).run()
    assert without.num_evictions > 2 * with_reserve.num_evictions
    assert without.num_recomputed > 1.5 * with_reserve.num_recomputed
    assert with_reserve.num_steps < 1.2 * without.num_steps, "what the reserve may cost"
