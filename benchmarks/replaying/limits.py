"""What forking could save at best, counted from the scripts alone, without an engine.

Receives scripts; hands on `Limits`. The model behind it is a request that has the engine to itself: every live thread
samples one token in every step, a child begins in the step after its parent's [Fork], and a thread that has sampled its
EOS frees at once what only it held. Definitions of the figures: docs/statistics.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.replaying.scripts import Script, flatten


@dataclass(frozen=True)
class Cost:
    """What one request costs. Tokens are positions of a path, blocks are KV blocks."""

    steps: int
    attended_tokens: int
    peak_cached_tokens: int
    block_steps: int
    """KV blocks held, summed over the steps."""


@dataclass(frozen=True)
class Limits:
    """Over all requests; savings are shares of the sequential sum."""

    forked_share: float
    mean_threads: float
    peak_cached_saving: float
    attended_saving: float
    critical_path_saving: float
    block_steps_bound: float
    """Sequential over wide: where memory is short, the throughput cannot grow by more."""


@dataclass(frozen=True)
class _Thread:
    parent: int | None
    start_step: int
    path_len: int
    """Tokens before the thread's first own one, [Child] included."""
    num_sampled: int
    fork_position: int
    """1-based position of the [Fork] it came from; 0 for the root."""


def sequential_cost(num_prompt_tokens: int, num_output_tokens: int, block_size: int) -> Cost:
    """One thread of `num_output_tokens` tokens, the EOS included."""
    prompt, output = num_prompt_tokens, num_output_tokens
    return Cost(
        steps=output,
        attended_tokens=sum(prompt + i for i in range(1, output + 1)),
        peak_cached_tokens=prompt + output,
        # The token sampled last is never fed, so that step i holds the prompt and the i tokens before.
        block_steps=sum(-(-(prompt + i) // block_size) for i in range(output)),
    )


def wide_cost(num_prompt_tokens: int, script: Script, block_size: int) -> Cost:
    """All threads at once. Blocks are shared as the engine shares them: those full before the [Fork]."""
    threads = _threads(num_prompt_tokens, script)
    steps = max(thread.start_step + thread.num_sampled for thread in threads)
    peak_tokens = block_steps = 0
    for step in range(steps):
        tokens, blocks = _held(threads, step, block_size)
        peak_tokens = max(peak_tokens, tokens)
        block_steps += blocks
    attended = sum(t.path_len + i for t in threads for i in range(1, t.num_sampled + 1))
    return Cost(steps, attended, peak_tokens, block_steps)


def limits(requests: Iterable[tuple[int, Script]], block_size: int) -> Limits:
    """Of (prompt tokens, script) pairs, at least one."""
    sequential, wide, threads = [], [], []
    for num_prompt_tokens, script in requests:
        sequential.append(sequential_cost(num_prompt_tokens, len(flatten(script)) + 1, block_size))
        wide.append(wide_cost(num_prompt_tokens, script, block_size))
        threads.append(len(_threads(num_prompt_tokens, script)))

    def ratio(name: str) -> float:
        return float(sum(getattr(cost, name) for cost in wide) / sum(getattr(cost, name) for cost in sequential))

    return Limits(
        forked_share=sum(count > 1 for count in threads) / len(threads),
        mean_threads=sum(threads) / len(threads),
        peak_cached_saving=1 - ratio("peak_cached_tokens"),
        attended_saving=1 - ratio("attended_tokens"),
        critical_path_saving=1 - ratio("steps"),
        block_steps_bound=1 / ratio("block_steps"),
    )


def _threads(num_prompt_tokens: int, script: Script) -> list[_Thread]:
    """All threads, each after its parent."""
    threads: list[_Thread] = []
    waiting: list[tuple[Script, int | None, int, int, int]] = [(script, None, 0, num_prompt_tokens, 0)]
    while waiting:
        items, parent, start_step, path_len, fork_position = waiting.pop()
        number = len(threads)
        threads.append(_Thread(parent, start_step, path_len, len(items) + 1, fork_position))
        for index, item in enumerate(items):
            if isinstance(item, list):
                position = path_len + index + 1
                waiting.append((item, number, start_step + index + 1, position + 1, position))
    return threads


def _held(threads: list[_Thread], step: int, block_size: int) -> tuple[int, int]:
    """Distinct (tokens, blocks) of the threads that sample in this step, the tokens sampled in it included.

    Each thread owns what is behind its fork; of that, as much is held as it or a thread below it still needs.
    """
    need_tokens, need_blocks = [0] * len(threads), [0] * len(threads)
    tokens = blocks = 0
    for number in range(len(threads) - 1, -1, -1):
        thread = threads[number]
        sampled_before = step - thread.start_step
        if 0 <= sampled_before < thread.num_sampled:
            fed = thread.path_len + sampled_before
            need_tokens[number] = max(need_tokens[number], fed + 1)
            need_blocks[number] = max(need_blocks[number], -(-fed // block_size))
        if not need_tokens[number]:
            continue
        shared_tokens = thread.fork_position
        shared_blocks = max(0, thread.fork_position - 1) // block_size
        tokens += need_tokens[number] - shared_tokens
        blocks += need_blocks[number] - shared_blocks
        if thread.parent is not None:
            need_tokens[thread.parent] = max(need_tokens[thread.parent], shared_tokens)
            need_blocks[thread.parent] = max(need_blocks[thread.parent], shared_blocks)
    return tokens, blocks
