"""Receipts, counted again with explicit sets from what the engine's steps computed, held and sampled."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import ROOMY, TIGHT, Engine, Reference, Watch, engine, greedy, receipt, stats
from pipeline import Pipeline
from recount import Recount, assert_right
from tiny_models import CHILD, EOS, FIRST_PLAIN, FORK, MAX_MODEL_LEN, VOCAB_SIZE, random_prompts

from apar.options import ForkLimits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": ROOMY},
    "tight": {"num_blocks": TIGHT},
    "tight and chunked": {"num_blocks": TIGHT, "max_num_batched_tokens": 40, "max_num_seqs": 32},
    "tight, no prefix cache": {"num_blocks": TIGHT, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=SETTINGS)
def shared(
    request: pytest.FixtureRequest, in_process: None, forky_folder: Path, forky_reference: Reference
) -> Iterator[Engine]:
    with engine(forky_folder, reference=forky_reference, **SETTINGS[request.param]) as started:
        yield started


def assert_counted_right(running: Engine, outputs: list[Any]) -> None:
    for output in outputs:
        root = running.internal[output.request_id]
        assert_right(running.watch, root, receipt(output), len(output.outputs[0].token_ids))


@pytest.mark.parametrize("seed", range(30))
def test_random_groups_of_an_arithmetic_model_are_counted_right(tiny_folder: Path, seed: int) -> None:
    """The real scheduler with small blocks, budgets and limits, many more of them than real weights could compute."""
    random = Random(seed)
    longest, budget = random.choice([40, 64]), random.choice([8, 20, 64])
    limits = ForkLimits(random.choice([1, 2, 3, 32]), random.choice([0, 1, 3, 64]), random.choice([1, 2, 3]))
    pipeline = Pipeline(
        tiny_folder, num_blocks=random.choice([16, 24, 200]), max_model_len=longest, seed=seed, asynchronous=False,
        max_num_batched_tokens=budget, max_num_seqs=min(16, budget), limits=limits,
    )  # fmt: skip
    watch, widest = Watch(pipeline.scheduler), 0

    def look(scheduler: Any) -> None:
        nonlocal widest
        running = Counter(request.request_id.split("#")[0] for request in scheduler.running)
        widest = max([widest, *running.values()])

    watch.on_step = look
    expected = {}
    for i in range(random.choice([1, 4, 8])):
        prompt = [random.randrange(5, 24) for _ in range(random.choice([2, 5, 11, longest - 4, longest - 2]))]
        max_tokens = random.choice([1, 5, 30, 100])
        expected[f"r{i}"] = pipeline.expected(prompt, max_tokens=max_tokens)
        pipeline.add(f"r{i}", prompt, greedy(max_tokens))
    while pipeline.busy():
        pipeline.step()
    pipeline.assert_empty()
    assert widest <= limits.max_width
    for name, answer in expected.items():
        assert pipeline.tokens[name] == answer.token_ids
        found = pipeline.ends[name].kv_transfer_params["apar"]
        nodes = [(node.node, node.parent, node.kind, node.start, node.end) for node in answer.nodes]
        assert [(*node[:3], *node[4:6]) for node in found["nodes"]] == nodes
        assert_right(watch, name, found, len(answer.token_ids))


def test_a_receipt_on_the_way_counts_what_its_threads_have_done_by_then(tiny_folder: Path) -> None:
    """With stop strings the front end may end a request at any output, and the receipt of that one is the last."""
    num_seen = num_forked = num_recomputed = 0
    for seed in range(8):
        random = Random(seed)
        pipeline = Pipeline(tiny_folder, num_blocks=24, max_model_len=64, seed=seed, asynchronous=False)
        watch = Watch(pipeline.scheduler)
        for i in range(4):
            pipeline.add(f"r{i}", [random.randrange(5, 24) for _ in range(5)], greedy(60, stop=["never"]))
        while pipeline.busy():
            pipeline.step()
            for name, output in pipeline.said.items():
                found, recount = output.kv_transfer_params["apar"], Recount(watch, name)
                assert found["stats"]["attended_tokens"] == recount.attended
                assert found["stats"]["recomputed_tokens"] == recount.computed_again()[0]
                assert found["nodes"][-1][5] == len(pipeline.tokens[name])
                if output.finish_reason is None:
                    num_seen += 1
                    num_forked += found["stats"]["threads"] > 1
                    num_recomputed += found["stats"]["recomputed_tokens"] > 0
                else:
                    assert_right(watch, name, found, len(pipeline.tokens[name]))
    assert num_seen > 100
    assert num_forked > 20
    assert num_recomputed > 0


def test_whole_answers_are_counted_right(running: Engine) -> None:
    prompts = random_prompts(14, seed=0, max_tokens=80)
    outputs = running.run(prompts, greedy(400))
    assert_counted_right(running, outputs)
    assert sum(stats(output)["threads"] for output in outputs) > 40
    preemptions = sum(stats(output)["preemptions"] for output in outputs)
    assert preemptions > 0 if running.num_blocks == TIGHT else preemptions == 0


@pytest.mark.parametrize("seed", range(2))
def test_answers_that_are_cut_are_counted_right(running: Engine, seed: int) -> None:
    random = Random(seed)
    prompts, params = random_prompts(14, seed=seed + 10, max_tokens=100), []
    for _ in prompts:
        apar = {"max_width": random.choice([1, 2, 32]), "max_forks": random.choice([1, 4, 64])}
        stop = random.sample(range(FIRST_PLAIN, VOCAB_SIZE), random.choice([0, 2]))
        params.append(greedy(random.choice([5, 40, 200]), apar, stop_token_ids=stop))
    assert_counted_right(running, running.run(prompts, params))


def test_samples_of_one_prompt_are_counted_each_for_itself(running: Engine) -> None:
    (prompt,) = random_prompts(1, seed=4)
    chunked = running.scheduler.max_num_scheduled_tokens < MAX_MODEL_LEN  # on CPU a seeded prefill cannot be split
    seeds = [None if chunked else seed for seed in range(4)]
    outputs = running.run([prompt] * 4, [greedy(150, temperature=1.0, seed=seed) for seed in seeds])
    assert_counted_right(running, outputs)


def test_an_answer_that_does_not_fork_has_the_figures_of_the_sequential_case(running: Engine) -> None:
    (prompt,) = random_prompts(1, seed=6, min_tokens=41, max_tokens=41)
    (output,) = running.run([prompt], greedy(53, False, ignore_eos=True))
    found = stats(output)
    assert (found["threads"], found["forks"], found["steps"]) == (1, 0, 53)
    assert (found["peak_cached_tokens"], found["peak_blocks"], found["attended_tokens"]) == (93, 3, 3604)
    assert_counted_right(running, [output])


# --- Forced tokens: trees whose figures are counted by hand ---


def script(paths: dict[tuple[int, ...], list[Any]], prompt: list[int]) -> dict[str, int]:
    """The next token by path, out of what each thread samples; keys are what a thread's path starts with."""
    wanted = {}
    for start, tokens in paths.items():
        path = [*prompt, *start]
        for token in tokens:
            wanted[" ".join(map(str, path))] = token
            path.append(token)
    return wanted


def forcing() -> type:
    """A logits processor of vLLM's own kind that leaves only the script's token."""
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            wanted = (params.extra_args or {}).get("script")
            if wanted is None:
                return None

            def force(prompt_ids: list[int], output_ids: list[int], logits_v: torch.Tensor) -> torch.Tensor:
                token = wanted.get(" ".join(map(str, [*prompt_ids, *output_ids])), EOS)
                forced_v = torch.full_like(logits_v, -torch.inf)
                forced_v[token] = 0.0
                return forced_v

            return force

    return Forcing


@pytest.fixture(scope="module")
def forced(in_process: None, tiny_folder: Path) -> Iterator[Engine]:
    with engine(tiny_folder, ROOMY, logits_processors=[forcing()]) as started:
        yield started


A, B, X, Y = 10, 11, 12, 13


def run_script(forced: Engine, prompt: list[int], paths: dict[tuple[int, ...], list[Any]], **more: Any) -> Any:
    forced.watch.clear()
    (output,) = forced.run([prompt], greedy(100, extra_args={"script": script(paths, prompt), **more}))
    forced.assert_empty()
    return output


def test_the_worked_example_of_the_docs(forced: Engine) -> None:
    """docs/statistics.md, with blocks of 32: one of the root thread, and the child's copy of it."""
    output = run_script(forced, [20, 21, 22], {(): [A, FORK, B, EOS], (A, FORK, CHILD): [X, Y, EOS]})
    assert list(output.outputs[0].token_ids) == [A, X, Y, B, EOS]
    assert stats(output) == {
        "threads": 2, "forks": 1, "max_width": 2, "steps": 5, "peak_cached_tokens": 8, "peak_blocks": 2,
        "attended_tokens": 46, "sequential_peak_tokens": 8, "sequential_attended_tokens": 30,
        "preemptions": 0, "recomputed_tokens": 0, "fork_prefill_tokens": 2, "copied_forks": 1,
    }  # fmt: skip
    assert receipt(output)["nodes"] == [
        [0, None, "root", 0, 0, 1, 0, 0],
        [1, 0, "detail", 1, 1, 3, 2, 3],
        [2, 0, "sibling", 0, 3, 5, 2, 3],
    ]


def test_a_fork_at_the_end_of_a_block(forced: Engine) -> None:
    """P = 30: [Fork] is the last of the first block, which is shared without a copy; [Child] and `b` begin others."""
    prompt = list(range(20, 50))
    output = run_script(forced, prompt, {(): [A, FORK, B, EOS], (A, FORK, CHILD): [X, Y, EOS]})
    found = stats(output)
    # Step 3: prompt, a, [Fork], b; [Child], x. In step 2 [Fork] fills the block, and the child shares it at once.
    assert (found["peak_cached_tokens"], found["peak_blocks"]) == (35, 3)
    assert found["attended_tokens"] == (31 + 32 + 33 + 34) + (34 + 35 + 36)
    assert (found["fork_prefill_tokens"], found["copied_forks"]) == (1, 1)


def test_a_fork_behind_a_full_block_shares_it_without_a_copy(forced: Engine) -> None:
    """P = 31: `a` fills the block, which the child shares; [Fork] and [Child] begin one of its own."""
    prompt = list(range(20, 51))
    output = run_script(forced, prompt, {(): [A, FORK, B, EOS], (A, FORK, CHILD): [X, Y, EOS]})
    found = stats(output)
    assert (found["peak_cached_tokens"], found["peak_blocks"]) == (36, 3)


def test_two_children_of_one_step_and_one_thread_at_a_time(forced: Engine) -> None:
    """Width 1: the root thread ends first, then the older child, then the younger."""
    paths = {
        (): [FORK, FORK, A, EOS],
        (FORK, CHILD): [X, X, EOS],
        (FORK, FORK, CHILD): [Y, EOS],
    }
    output = run_script(forced, [20, 21, 22], paths, apar={"max_width": 1})
    assert list(output.outputs[0].token_ids) == [X, X, Y, A, EOS]
    assert receipt(output)["nodes"] == [
        [0, None, "root", 0, 0, 0, 0, 0],
        [1, 0, "detail", 1, 0, 2, 4, 5],
        [2, 0, "sibling", 0, 2, 2, 0, 0],
        [3, 2, "detail", 2, 2, 3, 7, 7],
        [4, 2, "sibling", 0, 3, 5, 2, 3],
    ]
    found = stats(output)
    assert (found["max_width"], found["steps"], found["threads"]) == (1, 9, 3)
