"""The admission policy, rule by rule, and inside simulated engines that run random workloads to their end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import Group, Request, Script, SimulatedEngine, Step, Thread

from apar.admission import PoolUse, Room, Start, admit, surplus

URGENT, FORK, RESUMED, FRESH = Start
POOLS = ("first", "second")


@dataclass(frozen=True)
class Candidate:
    name: str
    need: int
    start: Start
    pool: str | None = None
    young: bool = False


def admitted(
    room: Room, candidates: list[Candidate], pools: Mapping[str, PoolUse] | None = None, *, contended: bool = True
) -> str:
    """Names of who may start, joined."""
    chosen = admit(room, candidates, lambda candidate: candidate.need, pools, lambda pool: contended)
    return "".join(candidate.name for candidate in chosen)


# Rule by rule


@pytest.mark.parametrize(
    ("start", "blocks"),
    [(URGENT, [0] * 5), (FORK, [1, 1, 2, 2, 2]), (RESUMED, [1, 1, 2, 2, 3]), (FRESH, [1, 1, 2, 2, 3])],
)
def test_what_stays_free_for_one_to_five_running_threads(start: Start, blocks: list[int]) -> None:
    assert start.reserve(0, 0) == 0
    assert [start.reserve(num_running, 0) for num_running in (1, 2, 3, 4, 5)] == blocks


def test_threads_that_are_about_to_fork_keep_more_room() -> None:
    for start in (RESUMED, FRESH):
        assert [start.reserve(4, num_young) for num_young in range(5)] == [2, 4, 5, 7, 8]
    assert FORK.reserve(4, 4) == 2
    assert URGENT.reserve(4, 4) == 0


def test_a_thread_starts_only_when_its_reserve_stays_free() -> None:
    # 3 run and 7 blocks are free.
    room = Room(num_blocks=20, num_free_blocks=7, num_running=3, max_running=9)
    for start, most in ((URGENT, 7), (FORK, 5), (RESUMED, 5), (FRESH, 5)):
        assert admitted(room, [Candidate("a", most, start)]) == "a"
        assert admitted(room, [Candidate("a", most + 1, start)]) == ""
    room = Room(num_blocks=20, num_free_blocks=7, num_running=3, max_running=9, num_young=2)
    for start, most in ((URGENT, 7), (FORK, 5), (RESUMED, 2), (FRESH, 2)):
        assert admitted(room, [Candidate("a", most, start)]) == "a"
        assert admitted(room, [Candidate("a", most + 1, start)]) == ""


def test_those_chosen_before_count_as_running() -> None:
    room = Room(num_blocks=20, num_free_blocks=7, num_running=3, max_running=9)
    # 4 run with the first candidate, 2 blocks stay free; 5 with the second: 3.
    assert admitted(room, [Candidate("a", 2, RESUMED), Candidate("b", 3, RESUMED)]) == "ab"
    assert admitted(room, [Candidate("a", 2, RESUMED), Candidate("b", 4, RESUMED)]) == "a"
    assert admitted(room, [Candidate("a", 1, RESUMED), Candidate("b", 2, RESUMED), Candidate("c", 1, RESUMED)]) == "abc"
    # A young one keeps 2 blocks from those behind it.
    assert admitted(room, [Candidate("a", 2, FRESH, young=True), Candidate("b", 1, FRESH)]) == "ab"
    assert admitted(room, [Candidate("a", 2, FRESH, young=True), Candidate("b", 2, FRESH)]) == "a"
    assert admitted(room, [Candidate("a", 2, FRESH), Candidate("b", 3, FRESH)]) == "ab"


def test_an_urgent_fork_takes_the_last_block_and_nobody_else_does() -> None:
    room = Room(num_blocks=20, num_free_blocks=1, num_running=3, max_running=9)
    assert admitted(room, [Candidate("a", 1, URGENT)]) == "a"
    for start in (FORK, RESUMED, FRESH):
        assert admitted(room, [Candidate("a", 1, start)]) == ""


def test_only_forks_pass_a_thread_that_does_not_fit() -> None:
    room = Room(num_blocks=20, num_free_blocks=8, num_running=1, max_running=9)
    line = [Candidate("a", 8, RESUMED), Candidate("b", 1, RESUMED), Candidate("c", 1, FORK), Candidate("d", 1, RESUMED)]
    assert admitted(room, line) == "c"
    assert admitted(room, [*line, Candidate("e", 2, FORK), Candidate("f", 3, FORK)]) == "cef"
    assert admitted(room, [*line, Candidate("e", 2, URGENT), Candidate("f", 5, URGENT)]) == "cef"


def test_nobody_passes_a_fork_that_does_not_fit() -> None:
    room = Room(num_blocks=20, num_free_blocks=6, num_running=1, max_running=9)
    line = [Candidate("a", 1, FORK), Candidate("b", 6, FORK)]
    for start in Start:
        assert admitted(room, [*line, Candidate("c", 1, start)]) == "a"


def test_a_fresh_request_passes_nobody() -> None:
    room = Room(num_blocks=20, num_free_blocks=6, num_running=1, max_running=9)
    for start in Start:
        assert admitted(room, [Candidate("a", 1, FRESH), Candidate("b", 9, start), Candidate("c", 0, FRESH)]) == "a"


def test_with_nothing_running_the_first_starts_even_in_the_last_block() -> None:
    room = Room(num_blocks=4, num_free_blocks=4, num_running=0, max_running=9)
    for start in Start:
        assert admitted(room, [Candidate("a", 4, start), Candidate("b", 1, FRESH)]) == "a"
        # Even if its need is put too high: nobody else would ever free a block for it.
        assert admitted(room, [Candidate("a", 5, start), Candidate("b", 1, FRESH)]) == "a"


def test_no_more_run_than_the_engine_takes() -> None:
    room = Room(num_blocks=90, num_free_blocks=80, num_running=2, max_running=4)
    for start in Start:
        assert admitted(room, [Candidate(name, 1, start) for name in "abc"]) == "ab"
        assert admitted(Room(90, 80, 4, 4), [Candidate("a", 1, start)]) == ""


def test_candidates_are_read_and_measured_only_as_far_as_needed() -> None:
    read: list[str] = []
    measured: list[str] = []

    def line(starts: list[Start]) -> Iterator[Candidate]:
        for name, start in zip("abcdef", starts, strict=False):
            read.append(name)
            yield Candidate(name, 5, start)

    def need(candidate: Candidate) -> int:
        measured.append(candidate.name)
        return candidate.need

    assert [c.name for c in admit(Room(20, 7, 1, 9), line([FRESH] * 4), need)] == ["a"]
    assert read == measured == ["a", "b"]
    read.clear()
    measured.clear()
    # Behind the second, which does not fit, only forks are measured; the first fresh one ends it.
    starts = [FORK, RESUMED, RESUMED, FRESH, FORK]
    assert [c.name for c in admit(Room(20, 7, 1, 9), line(starts), need)] == ["a"]
    assert read == ["a", "b", "c", "d"]
    assert measured == ["a", "b"]


def test_a_pool_at_its_share_starts_nothing_while_another_waits() -> None:
    # Share: 0.5 of 20 = 10 blocks. It holds 6, a candidate takes 3 and one running thread reserves 1: 10 in all.
    room = Room(20, 14, 1, 9)
    line = [Candidate("a", 3, FRESH, "first"), Candidate("b", 1, FRESH, "first"), Candidate("c", 1, FRESH)]
    assert admitted(room, line, {"first": PoolUse(0.5, 6, 1)}) == "ac"
    assert admitted(room, line, {"first": PoolUse(0.5, 7, 1)}) == "c"
    assert admitted(room, line, {"first": PoolUse(0.5, 7, 1)}, contended=False) == "abc"


def test_an_urgent_fork_fills_the_share_of_its_pool_and_does_not_exceed_it() -> None:
    room = Room(20, 14, 1, 9)
    line = [Candidate("a", 3, URGENT, "first"), Candidate("b", 1, URGENT, "first"), Candidate("c", 1, FRESH)]
    assert admitted(room, line, {"first": PoolUse(0.5, 7, 1)}) == "ac"
    assert admitted(room, line, {"first": PoolUse(0.5, 8, 1)}) == "c"


def test_nothing_younger_of_a_pool_passes_a_thread_that_its_share_has_no_room_for() -> None:
    # Otherwise short threads of a job could keep a long one from ever starting.
    for start in Start:
        line = [Candidate("a", 5, RESUMED, "first"), Candidate("b", 1, start, "first"), Candidate("c", 1, start)]
        assert admitted(Room(20, 14, 1, 9), line, {"first": PoolUse(0.5, 6, 1)}) == "c"


def test_one_thread_of_a_pool_may_run_however_small_its_share() -> None:
    for start in Start:
        line = [Candidate("a", 5, start, "first"), Candidate("b", 1, start, "first")]
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
    """Threads are chosen in line. Who is passed over was no fork, and only forks pass it; or its pool is at its share
    while others wait, and nobody of its pool passes it."""
    line = iter(step.candidates)
    assert all(any(other is chosen for other in line) for chosen in step.chosen), "chosen in line"
    left = set(step.chosen)
    for thread, start in step.candidates.items():
        if not left:
            break
        if thread in left:
            left.remove(thread)
        elif start is not RESUMED or any(not step.candidates[other].forks for other in left):
            assert engine.shares.get(thread.pool or "", 1) < 1
            assert thread.pool is not None
            assert engine.contended(thread.pool)
            assert not any(other.pool == thread.pool for other in left)


def check_progress(step: Step, running: list[Thread], started: list[Group]) -> None:
    if running or step.candidates:
        assert step.served
    if running:
        assert running[0] in step.served, "the oldest running thread keeps its blocks and goes on"
    if started and not any(thread.group is started[0] for thread in step.served):
        # The oldest group waits for younger ones to end: of its pool, or of no pool, only their forks have passed it.
        waiting = next(thread for thread in step.candidates if thread.group is started[0])
        assert running
        assert all(step.candidates[t].forks for t in step.started if t.pool == waiting.pool)


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_every_workload_ends_in_order_within_its_blocks(random: Random) -> None:
    run_checked(random_engine(random))


def test_many_workloads_end_in_order_within_their_blocks() -> None:
    num_evictions = num_tokens = 0
    for seed in range(5_000):
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


def test_a_fork_starts_at_once_and_leaves_its_parent_a_block() -> None:
    # 5 + 1 tokens take two blocks; the child's path of 7 shares the first and takes one of its own.
    engine = SimulatedEngine([Request(5, Script(3, ((1, Script(2)),)))], num_blocks=4, block_size=4)
    engine.step()
    step = engine.step()
    assert step.candidates == {engine.groups[0].threads[1]: FORK}
    assert step.started == [engine.groups[0].threads[1]]
    assert len(engine.free) == 1
    run_checked(engine)
    assert engine.num_evictions == 0


def test_a_younger_request_gives_way_to_a_fork_when_no_block_is_free() -> None:
    requests = [Request(2, Script(8, ((2, Script(10)),))), Request(4, Script(8))]
    engine = SimulatedEngine(requests, num_blocks=7, block_size=2)
    first, second = (group.threads[0] for group in engine.groups)
    step = next(step for step in engine.steps() if step.gave_way or step.evicted)
    assert (step.gave_way, step.evicted) == ([second], [])
    assert step.candidates[first.group.threads[1]] is URGENT
    assert step.started == [first.group.threads[1]]
    run_checked(engine)


def test_a_child_whose_parent_has_ended_is_a_fork_no_more() -> None:
    engine = SimulatedEngine([Request(5, Script(3, ((1, Script(2)),)))], num_blocks=2, block_size=4)
    steps = list(engine.steps())
    assert [list(step.candidates.values()) for step in steps] == [[FRESH], [FORK], [FORK], [RESUMED], []]
    assert [len(step.started) for step in steps] == [1, 0, 0, 1, 0]


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
    monkeypatch.setattr(Start, "reserve", lambda start, num_running, num_young: 0)
    without = SimulatedEngine(requests, num_blocks, 32).run()
    assert without.num_evictions > 2 * with_reserve.num_evictions
    assert without.num_recomputed > 1.5 * with_reserve.num_recomputed
    assert with_reserve.num_steps < 1.2 * without.num_steps, "what the reserve may cost"
