"""What forking costs the scheduler: milliseconds per engine step beside vLLM's own scheduler, with no model behind.

    python -m benchmarks.scheduler_overhead --threads 256 --json

Both schedulers run for real, with their real KV cache manager; sampled tokens come from a script. Each has the same
number of rows in every step: stock as single requests, ours as groups of several threads that have forked before the
clock starts. A third run has no forks under our scheduler: what an ordinary request pays. Sides alternate; medians are
taken.

A fourth run is under pressure, where stock would run other rows: four times the threads, each with an end, in a cache
that holds about half of `--threads`. There our part is what a step takes beyond vLLM's own methods within it.
"""

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import click

from worker.engine import prepare_environment

FORK, CHILD, WORD, EOS = 5, 6, 7, 2
PROMPT_TOKENS = 26
SIDES = ("stock", "ours without forks", "ours with forks")


@click.command()
@click.option("--threads", default=256, show_default=True, help="Rows in every step.")
@click.option("--width", default=4, show_default=True, help="Threads of each group.")
@click.option("--steps", default=200, show_default=True, help="Steps of one measurement.")
@click.option("--rounds", default=5, show_default=True, help="Measurements of each side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def main(threads: int, width: int, steps: int, rounds: int, as_json: bool) -> None:
    """Time `schedule` and `update_from_output` of both schedulers."""
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="forq-overhead-") as folder:
        config = _config(Path(folder), threads)
        pressed = _measure_pressed(_config(Path(folder), threads), threads, width)
        samples: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                samples[side].append(_measure(config, side, threads, width, steps))
    times = {side: median(values) for side, values in samples.items()}
    line = {
        "threads": threads,
        "width": width,
        "stock_ms": round(times[SIDES[0]], 3),
        "unforked_ms": round(times[SIDES[1]], 3),
        "forked_ms": round(times[SIDES[2]], 3),
        "unforked_overhead_ms": round(times[SIDES[1]] - times[SIDES[0]], 3),
        "forked_overhead_ms": round(times[SIDES[2]] - times[SIDES[0]], 3),
        **pressed,
    }
    print(json.dumps(line) if as_json else "\n".join(f"{name}: {value}" for name, value in line.items()))


def _config(folder: Path, threads: int) -> Any:
    from vllm import EngineArgs

    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
                "apar": {"fork_token_id": FORK, "child_token_id": CHILD},
            }
        )
    )
    args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", block_size=32, max_num_seqs=threads,
        max_num_batched_tokens=max(8192, threads * 64), enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        max_model_len=4096, enable_chunked_prefill=True,
    )  # fmt: skip
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = 1 + threads * (4096 // 32)
    return config


def _measure(config: Any, side: str, threads: int, width: int, steps: int) -> float:
    """Median milliseconds per step of one scheduler over `steps` decoding steps."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from apar.scheduler import SyncForkingScheduler

    scheduler = _scheduler(config, Scheduler if side == SIDES[0] else SyncForkingScheduler)
    forks = width - 1 if side == SIDES[2] else 0
    for number in range(threads // (forks + 1)):
        scheduler.add_request(_request(config, number))
    _step(scheduler, WORD)
    for _ in range(forks):
        # Only root threads say [Fork], which makes groups of `width` threads.
        _step(scheduler, FORK, WORD)
        _step(scheduler, WORD)
    while len(scheduler.running) < threads:
        _step(scheduler, WORD)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does behind its start
    times = [_step(scheduler, WORD) for _ in range(steps)]
    gc.unfreeze()
    assert len(scheduler.running) == threads, "every thread must still run"
    return median(times) * 1000


def _measure_pressed(config: Any, threads: int, width: int) -> dict[str, float]:
    """Means over the steps of a run in which threads wait: rows, waiting threads, preemptions, our milliseconds."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from apar.scheduler import SyncForkingScheduler

    spent = {"base": 0.0, "all": 0.0}

    class Timed(Scheduler):  # type: ignore[misc]
        """vLLM's own part."""

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            with _clocked(spent, "base"):
                return super().schedule(*args, **kwargs)

        def update_from_output(self, *args: Any) -> Any:
            with _clocked(spent, "base"):
                return super().update_from_output(*args)

    class TimedForking(SyncForkingScheduler, Timed):
        """Ours around it, by the order of the bases."""

    config.cache_config.num_gpu_blocks = 1 + max(threads, 4096 // 32)
    scheduler = _scheduler(config, TimedForking)
    random = Random(1)
    scripts: dict[str, list[int]] = {}
    groups = 4 * threads // width
    for number in range(groups):
        scheduler.add_request(_request(config, number))
    steps = []
    gc.collect()
    gc.freeze()
    while scheduler.has_requests():
        spent.update(base=0.0, all=0.0)
        with _clocked(spent, "all"):
            output = scheduler.schedule()
        waiting = len(scheduler._waiting_threads)
        result = _scripted(scheduler, output, scripts, width, random)
        with _clocked(spent, "all"):
            scheduler.update_from_output(output, result)
        if waiting:
            steps.append((len(output.num_scheduled_tokens), waiting, 1000 * (spent["all"] - spent["base"])))
    gc.unfreeze()
    names = ("pressed_rows", "pressed_waiting", "pressed_overhead_ms")
    return {name: round(mean(values), 3) for name, values in zip(names, zip(*steps, strict=True), strict=True)}


def _scripted(scheduler: Any, output: Any, scripts: dict[str, list[int]], width: int, random: Random) -> Any:
    """What each row samples: roots fork `width` - 1 times, every thread ends after some dozens of tokens."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    sampled: list[list[int]] = []
    for request_id in ids:
        request = scheduler.requests[request_id]
        if request_id not in scripts:
            script = [WORD] * random.randint(20, 90)
            if "#" not in request_id:
                for at in random.sample(range(len(script)), width - 1):
                    script[at] = FORK
            scripts[request_id] = [*script, EOS]
        # Until the whole path is computed, nothing is sampled.
        done = request.num_computed_tokens >= request.num_tokens
        sampled.append([scripts[request_id][request.num_output_tokens]] if done else [])
    return ModelRunnerOutput(ids, {request_id: index for index, request_id in enumerate(ids)}, sampled)


@contextlib.contextmanager
def _clocked(spent: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - started


def _step(scheduler: Any, root_token: int, child_token: int | None = None) -> float:
    """One engine step with scripted tokens; returns the scheduler's own seconds."""
    from vllm.v1.outputs import ModelRunnerOutput

    started = time.perf_counter()
    output = scheduler.schedule()
    scheduled = time.perf_counter()
    ids = list(output.num_scheduled_tokens)
    child = root_token if child_token is None else child_token
    sampled = [[child if "#" in request_id else root_token] for request_id in ids]
    result = ModelRunnerOutput(ids, {request_id: index for index, request_id in enumerate(ids)}, sampled)
    resumed = time.perf_counter()
    scheduler.update_from_output(output, result)
    return (scheduled - started) + (time.perf_counter() - resumed)


def _scheduler(config: Any, chosen: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return chosen(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=32,
        hash_block_size=32,
    )


def _request(config: Any, number: int) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    params = SamplingParams(temperature=0, max_tokens=4000)
    params.update_from_generation_config({}, EOS)
    prompt = [10 + (number * 7 + position) % 200 for position in range(PROMPT_TOKENS)]
    hasher = get_request_block_hasher(32, hash_fn)
    return Request(f"request-{number}", prompt, params, None, block_hasher=hasher)


if __name__ == "__main__":
    main()
