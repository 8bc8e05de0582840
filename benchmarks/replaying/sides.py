"""Starts one side's process and checks what it gives back.

Receives a `Setup` and the requests; hands on an `Outcome` whose outputs are the answers, or raises.
"""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.replaying.engine import Outcome, Task, read_outcome
from benchmarks.replaying.workload import CHILD_TOKEN_ID, FORK_TOKEN_ID, Request

Side = Literal["stock", "apar"]

FORCED = "benchmarks.replaying.forced:ForcedTokens"
FORKING_SCHEDULER = "apar.scheduler.ForkingScheduler"
MIN_BATCHED_TOKENS = 2048
PLACEHOLDER_KV_BYTES = 64 << 20
"""On CPU vLLM wants bytes, or takes most of the machine's memory; the number of blocks wins over them."""
DEFAULT_MAX_FORKS = 64


@dataclass(frozen=True)
class Setup:
    """What both sides share."""

    model: Path
    tokenizer: Path
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    concurrency: int
    cpu_threads: int | None
    """OpenMP threads of the engine; None: vLLM's own choice."""
    warm_up: int
    """Requests that run before the clock does."""

    def engine_args(self, side: Side, kv_blocks: int, max_forks: int) -> dict[str, Any]:
        """vLLM's `EngineArgs`; the sides differ in the scheduler alone."""
        args: dict[str, Any] = {
            "model": str(self.model),
            "tokenizer": str(self.tokenizer),
            "load_format": "dummy",
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, self.max_model_len),
            "num_gpu_blocks_override": kv_blocks + 1,  # vLLM keeps one block, the null block, for itself
            "kv_cache_memory_bytes": PLACEHOLDER_KV_BYTES,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "logits_processors": [FORCED],
        }
        if side == "apar":
            args["scheduler_cls"] = FORKING_SCHEDULER
            args["additional_config"] = {
                "apar": {
                    "fork_token_id": FORK_TOKEN_ID,
                    "child_token_id": CHILD_TOKEN_ID,
                    "max_forks": max(DEFAULT_MAX_FORKS, max_forks),
                }
            }
        return args


def run_side(side: Side, setup: Setup, kv_blocks: int, requests: list[Request], folder: Path) -> Outcome:
    """One fresh engine under `kv_blocks`, every request replayed, every output compared with its answer.

    Raises:
        click.ClickException: the engine failed, or an output is not the answer.
    """
    max_forks = max(request.num_threads - 1 for request in requests)
    task = Task(
        engine_args=setup.engine_args(side, kv_blocks, max_forks),
        prompts=[request.prompt for request in requests],
        replays=[request.replay(forked=side == "apar") for request in requests],
        concurrency=setup.concurrency,
        warm_up=setup.warm_up,
    )
    task_file, outcome_file = folder / f"{side}-task.json", folder / f"{side}-outcome.json"
    task_file.write_text(dumps(asdict(task)))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if setup.cpu_threads is not None:
        environment["OMP_NUM_THREADS"] = str(setup.cpu_threads)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replaying.engine", str(task_file), str(outcome_file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise click.ClickException(f"{side} at {kv_blocks} blocks failed:\n{done.stderr[-4000:]}")
    outcome = read_outcome(outcome_file)
    fault = fault_of(side, outcome, requests)
    if fault is not None:
        raise click.ClickException(f"{side} at {kv_blocks} blocks: {fault}; no figure is worth anything then")
    return outcome


def fault_of(side: Side, outcome: Outcome, requests: list[Request]) -> str | None:
    """Why the outcome cannot count, or None: every output is its answer and every fork was made."""
    for number, (output, request) in enumerate(zip(outcome.outputs, requests, strict=True)):
        answer = [*request.plain, request.eos]
        if output != answer:
            place = next((i for i, pair in enumerate(zip(output, answer, strict=False)) if pair[0] != pair[1]), None)
            where = f"differs from token {place} on" if place is not None else f"has {len(output)} tokens"
            return f"output {number} {where}, the answer has {len(answer)} ({outcome.finish_reasons[number]})"
        if outcome.finish_reasons[number] != "stop":
            return f"output {number} ended with {outcome.finish_reasons[number]!r}, not with its EOS"
        stats = outcome.stats[number]
        if stats is not None and stats["threads"] != request.num_threads:
            return f"output {number} reports {stats['threads']} threads, its answer has {request.num_threads}"
    expected = sum(request.num_threads - 1 for request in requests) if side == "apar" else 0
    if outcome.log.num_children != expected:
        return f"{outcome.log.num_children} children ran, the answers have {expected}"
    return None
