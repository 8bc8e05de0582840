"""Thousands of random requests through the real scheduler in every kind of engine loop: synchronous and asynchronous,
with and without drafted tokens, under small KV budgets, with aborts.

Each checks tokens, finish reason and tree against the sequential reference decoder, every key and value that is read
(`pipeline.Runner`), and that everything is given back.
"""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pipeline import BLOCK_SIZE, EOS, FORK, VOCAB_SIZE, Pipeline
from tiny_models import make_tiny_model
from vllm import SamplingParams

from apar.options import ForkLimits

KINDS = {
    "sync": (False, 0, 0), "async": (True, 0, 0), "sync-drafts": (False, 3, 0), "async-drafts": (True, 3, 0),
    "sync-ahead": (False, 3, 3), "async-ahead": (True, 3, 3),
}  # fmt: skip
"""(asynchronous, drafts, positions behind them that the drafter needs, as EAGLE does)"""
MAX_STEPS = 20_000
SEEDS = int(os.environ.get("FORQ_TEST_SEEDS", "12"))
"""Of each kind, 50 requests each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("pipeline") / "tiny")  # for its config.json


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    asynchronous, num_drafts, num_lookahead = KINDS[request.param]
    return {"asynchronous": asynchronous, "num_drafts": num_drafts, "num_lookahead": num_lookahead}


class Asked:
    """A random request."""

    def __init__(self, random: Random, limits: ForkLimits, max_model_len: int) -> None:
        longest = min(24, max_model_len - 2)
        self.prompt = [random.randrange(5, VOCAB_SIZE) for _ in range(random.randint(1, longest))]
        self.max_width = 1000
        self.options: dict[str, Any] = {"max_tokens": random.choice([1, 2, 5, 20, 60, 200])}
        kinds: list[Any] = [{}, {}, {}, {"max_forks": 2}, {"max_depth": 1}, {"max_width": 1}, False]
        self.asked = random.choice(kinds)
        self.limits = limits
        if self.asked is not False and random.random() < 0.3:
            self.asked = {**self.asked, "pool": random.choice("ab"), "pool_share": random.choice([0.1, 0.5, 1.0])}
        if self.asked is False:
            self.options["fork"] = False
        else:
            said = self.asked
            self.max_width = said.get("max_width", 1000)
            self.limits = ForkLimits(
                max_forks=min(limits.max_forks, said.get("max_forks", 1000)),
                max_depth=min(limits.max_depth, said.get("max_depth", 1000)),
            )
        if random.random() < 0.2:
            self.options["stop_token_ids"] = random.sample(range(5, VOCAB_SIZE), 2)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.options["max_tokens"],
            stop_token_ids=self.options.get("stop_token_ids"),
            extra_args={"apar": self.asked},
        )


def run(pipeline: Pipeline, seed: int, limits: ForkLimits, max_model_len: int, num_requests: int, aborts: float) -> int:
    """Returns how many preemptions there were."""
    random = Random(seed)
    coming = {f"r{i}": Asked(random, limits, max_model_len) for i in range(num_requests)}
    waiting, aborted = list(coming), set[str]()
    for _ in range(MAX_STEPS):
        while waiting and random.random() < 0.3:
            name = waiting.pop()
            pipeline.add(name, coming[name].prompt, coming[name].params)
        live = [name for name in pipeline.tokens if name not in pipeline.ends and name not in aborted]
        if live and random.random() < aborts:
            name = random.choice(live)
            pipeline.abort(name)
            aborted.add(name)
        if pipeline.busy():
            pipeline.step()
        elif not waiting:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    pipeline.assert_empty()
    num_preemptions = 0
    for name, asked in coming.items():
        expected = pipeline.expected(asked.prompt, asked.limits, **asked.options)
        tokens = pipeline.tokens[name]
        if name in aborted:
            assert tokens == expected.token_ids[: len(tokens)]
            continue
        end = pipeline.ends[name]
        told = end.kv_transfer_params["apar"]
        assert tokens == expected.token_ids, name
        assert (str(end.finish_reason), end.stop_reason) == (expected.finish_reason, expected.stop_token_id)
        assert [(*node[:3], *node[4:6]) for node in told["nodes"]] == [
            (node.node, node.parent, node.kind, node.start, node.end) for node in expected.nodes
        ]
        num_preemptions += told["stats"]["preemptions"]
        if expected.finish_reason == "stop" and expected.stop_token_id is None:
            # Nothing is cut off, so the engine has sampled what the reference has, no more.
            figures = [told["stats"][name] for name in ("forks", "threads", "attended_tokens")]
            assert figures == [expected.num_forks, len(expected.threads), expected.attended_tokens]
            assert told["stats"]["max_width"] <= min(limits.max_width, asked.max_width)
    return num_preemptions


def engine(folder: Path, seed: int, kind: dict[str, Any]) -> tuple[Pipeline, ForkLimits, int]:
    random = Random(seed)
    num_blocks = random.choice([8, 10, 16, 24, 60, 300])
    max_model_len = min(random.choice([20, 32, 64, 120]), num_blocks * BLOCK_SIZE)
    limits = ForkLimits(
        max_width=random.choice([1, 2, 4, 32]), max_forks=random.choice([3, 8, 64]), max_depth=random.choice([1, 2, 3])
    )
    pipeline = Pipeline(
        folder,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        seed=seed,
        max_num_seqs=random.choice([2, 8, 16]),
        max_num_batched_tokens=random.choice([16, 64, 512]),
        limits=limits,
        **kind,
    )
    return pipeline, limits, max_model_len


@pytest.mark.parametrize("seed", [*range(SEEDS), 21])  # 21: a child's path, its drafts and its copy exceed the pool
def test_random_requests_in_every_kind_of_loop(folder: Path, kind: dict[str, Any], seed: int) -> None:
    pipeline, limits, max_model_len = engine(folder, seed, kind)
    run(pipeline, seed, limits, max_model_len, num_requests=50, aborts=0.0 if seed % 2 else 0.05)


def test_a_small_budget_preempts_and_changes_no_token(folder: Path, kind: dict[str, Any]) -> None:
    limits = ForkLimits()
    pipeline = Pipeline(folder, num_blocks=12, max_model_len=40, seed=5, **kind)
    assert run(pipeline, 5, limits, 40, num_requests=60, aborts=0.0) > 3
    assert (pipeline.runner.num_multiple > 50) == (kind["num_drafts"] > 0)


def test_the_arithmetic_model_forks_and_ends(folder: Path) -> None:
    """Else nothing here would mean much."""
    pipeline = Pipeline(folder, num_blocks=300, max_model_len=64, seed=1, asynchronous=False)
    results = [pipeline.expected([5 + i], max_tokens=40) for i in range(18)]
    assert sum(result.num_forks for result in results) > 20
    assert {result.finish_reason for result in results} == {"stop", "length"}
    assert all({EOS, FORK} & set(thread.path) for result in results for thread in result.threads[:1])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_paths_that_fill_the_pool(folder: Path, kind: dict[str, Any], seed: int) -> None:
    """Where the drafts and the block to copy no longer fit beside the path, it must start without the copy."""
    random = Random(seed)
    num_blocks = random.choice([6, 7, 8, 9, 10])
    max_model_len = num_blocks * BLOCK_SIZE - random.choice([0, 0, 1, 2, 3])
    limits = ForkLimits(max_width=random.choice([2, 4, 32]), max_depth=random.choice([1, 2, 3]))
    pipeline = Pipeline(folder, num_blocks=num_blocks, max_model_len=max_model_len, seed=seed, limits=limits, **kind)
    run(pipeline, seed, limits, max_model_len, num_requests=15, aborts=0.0)


@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_a_preempted_path_that_fills_the_pool_starts_again(folder: Path, num_lookahead: int) -> None:
    """With one position left to compute vLLM gives it room for drafts and drafter, beside the block that is copied."""
    kind: dict[str, Any] = {"asynchronous": False, "num_drafts": 3, "num_lookahead": num_lookahead}
    prompt, options = [5, 6, 7, 8], {"max_tokens": 24, "fork": False}
    engines = (Pipeline(folder, num_blocks=7, max_model_len=28, seed=seed, **kind) for seed in range(100))
    seed = next(engine.runner.seed for engine in engines if len(engine.expected(prompt, **options).token_ids) == 24)
    num_preempted = 0
    for length in range(16, 28):
        pipeline = Pipeline(folder, num_blocks=7, max_model_len=28, seed=seed, **kind)
        pipeline.add("r", prompt, SamplingParams(temperature=0.0, max_tokens=24, extra_args={"apar": False}))
        scheduler = pipeline.scheduler
        while "r" in scheduler.requests and scheduler.requests["r"].num_tokens < length:
            pipeline.step()
        if scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
            scheduler._threads["r"].preempted_step += 1  # as if the next step had done it: so it would be
            num_preempted += 1
        for _ in range(100):
            if pipeline.busy():
                pipeline.step()
        assert pipeline.tokens["r"] == pipeline.expected(prompt, **options).token_ids, length
        pipeline.assert_empty()
    assert num_preempted > 5
