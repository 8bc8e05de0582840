"""Thousands of random request groups through the real engine, a tiny model with real weights behind it.

    python -m benchmarks.random_groups --groups 2000 --json

Random prompts with random `max_tokens` and widths arrive at random steps under several KV budgets, the smallest that
vLLM accepts among them; some are aborted at a random step. At the end every group has ended, every block is free again,
every greedy answer equals the reference decoder's, and every receipt equals a recount from a log of the engine's steps.
Prompts whose answer float32 leaves open (two best tokens closer than its error) are counted and left out of the
comparison of tokens. (Limits of forks and depth are compared in the tests, on many thousands of groups of an arithmetic
model.)
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import click

from benchmarks.console import progress
from worker.engine import prepare_environment

sys.path.append(str(Path(__file__).parent.parent / "tests" / "apar"))

MAX_TOKENS = 120
VARIANTS = 5
"""Groups that share a prompt and its reference answer, with other limits and neighbours each."""


@click.command()
@click.option("--groups", default=2000, show_default=True)
@click.option(
    "--budgets", default="16,20,40,400", show_default=True, help="KV blocks of 32 tokens; 16 is the smallest."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def main(groups: int, budgets: str, seed: int, as_json: bool) -> None:
    """Compare random groups with the reference and their receipts with a recount."""
    prepare_environment()
    import torch
    from engines import Reference, engine
    from tiny_models import FLOAT32_ERROR, make_tiny_model, random_prompts
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    random, started = Random(seed), time.monotonic()
    blocks = [int(number) for number in budgets.split(",")]
    prompts = random_prompts(-(-groups // VARIANTS), seed)
    totals = {
        "groups": 0,
        "aborted": 0,
        "wrong_tokens": 0,
        "wrong_receipts": 0,
        "open": 0,
        "threads": 0,
        "preemptions": 0,
    }
    with tempfile.TemporaryDirectory(prefix="forq-groups-") as scratch:
        folder = make_tiny_model(Path(scratch) / "model")
        reference = Reference(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval())
        answers = []
        for number, prompt in enumerate(prompts):
            answers.append(reference.decode(prompt, max_tokens=MAX_TOKENS))
            progress("reference", number + 1, len(prompts))
        for number, num_blocks in enumerate(blocks):
            mine = [index % len(prompts) for index in range(groups) if index // VARIANTS % len(blocks) == number]
            random.shuffle(mine)
            with engine(folder, num_blocks, enable_chunked_prefill=True, max_num_batched_tokens=128) as running:
                _run(running, random, mine, prompts, answers, FLOAT32_ERROR, totals)
    line = {**totals, "seconds": round(time.monotonic() - started)}
    print(json.dumps(line) if as_json else "\n".join(f"{name}: {value}" for name, value in line.items()))
    sys.exit(1 if totals["wrong_tokens"] or totals["wrong_receipts"] else 0)


def _run(
    running: Any,
    random: Random,
    mine: list[int],
    prompts: list[Any],
    answers: list[Any],
    error: float,
    totals: dict[str, int],
) -> None:
    from engines import greedy, receipt
    from recount import assert_right

    waiting, live, aborted = list(mine), {}, set()
    while waiting or running.llm.has_unfinished_requests():
        while waiting and random.random() < 0.75:
            index = waiting.pop()
            max_tokens = random.choice([random.randint(1, MAX_TOKENS), MAX_TOKENS])
            options = {"max_width": random.choice([1, 2, 3, 32])}
            live[running.add(prompts[index], greedy(max_tokens, options))] = (index, max_tokens)
        if live and random.random() < 0.02:
            name = random.choice([*live])
            running.llm.abort_request([name])
            live.pop(name)
            aborted.add(name)
        for output in running.step():
            if not output.finished or output.request_id not in live:
                continue
            index, max_tokens = live.pop(output.request_id)
            (expected, gap), answer = answers[index], output.outputs[0]
            tokens, totals["groups"] = list(answer.token_ids), totals["groups"] + 1
            whole = max_tokens >= len(expected.token_ids)
            reason = expected.finish_reason if whole else "length"
            if gap < error:
                totals["open"] += 1
            elif (tokens, answer.finish_reason) != (expected.token_ids[:max_tokens], reason):
                totals["wrong_tokens"] += 1
            stats = receipt(output)["stats"]
            totals["threads"] += stats["threads"]
            totals["preemptions"] += stats["preemptions"]
            try:
                assert_right(running.watch, running.internal[output.request_id], receipt(output), len(tokens))
            except AssertionError as mismatch:
                totals["wrong_receipts"] += 1
                print(f"{output.request_id}: {mismatch}", file=sys.stderr)
        progress("groups", totals["groups"], totals["groups"] + len(waiting) + len(live))
    running.step()
    running.watch.finished.clear()
    running.assert_empty()
    totals["groups"] += len(aborted)
    totals["aborted"] += len(aborted)


if __name__ == "__main__":
    main()
