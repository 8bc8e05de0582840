"""The replay benchmark: its trees, scripts, bounds, counting and projection, and a run of both sides."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay import main
from benchmarks.replaying.counting import StepLog, Watch
from benchmarks.replaying.engine import Outcome
from benchmarks.replaying.limits import Cost, limits, sequential_cost, wide_cost
from benchmarks.replaying.projection import Gpu, Point, gpu_of, latency_at, point, projected_times, share_of_peak
from benchmarks.replaying.scripts import Replay, Script, encode_tree, flatten, num_threads, read_replay
from benchmarks.replaying.sides import fault_of
from benchmarks.replaying.trees import join, text_tree
from benchmarks.replaying.workload import Request

FORK, CHILD, EOS = 5, 6, 2
LIST = """Tips:
1. Plan: write it all down.
2. Rest: take breaks often.
   - walk a bit
3. Eat well. It helps a lot.
Go!"""

LINE = st.sampled_from(
    ["1. Head: some detail here", "2) A sentence. Another one follows here.", "- bullet", "", "   indented text", "```"]
) | st.text(max_size=60)
ANSWERS = st.lists(LINE, max_size=14).map("\n".join)


@given(ANSWERS, st.integers(0, 3))
def test_the_pieces_of_a_tree_are_the_answer(text: str, max_depth: int) -> None:
    assert join(text_tree(text, max_depth)) == text


def test_a_list_forks_after_each_heading() -> None:
    assert text_tree(LIST) == [
        "Tips:\n1. Plan:",
        [" write it all down."],
        "\n2. Rest:",
        [" take breaks often.\n   - walk a bit"],
        "\n3. Eat well.",
        [" It helps a lot."],
        "\nGo!",
    ]


def test_paragraphs_fork_after_their_first_sentence() -> None:
    paragraph = "This is the first sentence. And these are its details, long enough."
    tree = text_tree("\n\n".join([paragraph] * 3))
    assert [type(piece) for piece in tree] == [str, list] * 3
    assert tree[1] == [" And these are its details, long enough."]


@pytest.mark.parametrize("text", ["", "One line.", LIST.replace("Go!", "```1. x```"), "\n".join(LIST.split("\n")[:3])])
def test_what_has_no_three_points_or_is_code_stays_one_thread(text: str) -> None:
    assert text_tree(text) == [text]


def test_details_that_hold_a_list_fork_again_only_when_asked() -> None:
    inner = "".join(f"\n  {number}. Sub: details of it" for number in (1, 2, 3))
    text = f"1. One: see{inner}\n2. Two: the second detail\n3. Three: the third detail"
    assert text_tree(text, 1)[1] == [f" see{inner}"]
    details = [[" details of it"]] * 3
    assert text_tree(text, 2)[1] == [
        " see\n  1. Sub:",
        details[0],
        "\n  2. Sub:",
        details[1],
        "\n  3. Sub:",
        details[2],
    ]


def scripts(max_leaves: int = 12) -> st.SearchStrategy[Script]:
    token = st.integers(17, 40)
    return st.recursive(
        st.lists(token, max_size=8), lambda inner: st.lists(token | inner, max_size=8), max_leaves=max_leaves
    )


def run_script(replay: Replay, path: list[int]) -> list[int]:
    """The restored tokens of the thread with this path and of those below it, as a forking engine would run them."""
    restored, sampled = [], []
    for token in replay.forced_tokens(path):
        sampled.append(token)
        if token == replay.fork:
            restored += run_script(replay, [*path, *sampled, replay.child])
        elif token != replay.eos:
            restored.append(token)
    return restored


@given(scripts(), st.integers(1, 5))
def test_forced_threads_restore_to_the_answer(script: Script, num_prompt_tokens: int) -> None:
    replay = read_replay(Replay(script, num_prompt_tokens, FORK, CHILD, EOS).to_text())
    prompt = [*range(20, 20 + num_prompt_tokens)]
    assert run_script(replay, prompt) == flatten(script)


@given(scripts())
def test_a_resumed_thread_goes_on_where_it_was(script: Script) -> None:
    replay = Replay(script, 1, FORK, CHILD, EOS)
    tokens = replay.forced_tokens([9])
    for done in range(len(tokens)):
        assert replay.forced_tokens([9, *tokens[:done]]) == tokens[done:]


def test_a_path_of_another_script_is_refused() -> None:
    replay = Replay([20, [21]], 1, FORK, CHILD, EOS)
    with pytest.raises(ValueError, match="the script another"):
        replay.forced_tokens([9, 22])
    with pytest.raises(ValueError, match="follows no fork"):
        replay.forced_tokens([9, 20, CHILD])


def test_threads_and_tokens_of_an_encoded_tree() -> None:
    script = encode_tree(text_tree(LIST), lambda text: [ord(letter) for letter in text])
    assert "".join(map(chr, flatten(script))) == LIST
    assert num_threads(script) == 4


def test_a_request_with_one_fork_costs_what_the_hand_counts() -> None:
    # Prompt p p p; root: a [Fork] b EOS; child: x y z EOS. Blocks of 2 tokens.
    # step 0: root samples a (position 4), has fed 3 tokens: 2 blocks.
    # step 1: [Fork] (5), fed 4: 2 blocks.
    # step 2: b (6), fed 5: 3 blocks; the child's path is p p p a [Fork] [Child]; it samples x (7), fed 6: 3 blocks, of
    #         which the 2 full before [Fork] are the root's: 3 + 1.
    # step 3: EOS (7), fed 6: 3 blocks; y (8), fed 7: 4, own 2: 5. Cached: root 7, child's own 6, 7, 8: 10.
    # step 4: the root's own are gone, the shared 2 blocks stay: z (9), fed 8: 4 blocks. Cached 9.
    # step 5: EOS (10), fed 9: 5 blocks. Cached 10.
    script: Script = [30, [31, 32, 33], 34]
    assert wide_cost(3, script, 2) == Cost(
        steps=6,
        attended_tokens=4 + 5 + (6 + 7) + (7 + 8) + 9 + 10,
        peak_cached_tokens=10,
        block_steps=2 + 2 + 4 + 5 + 4 + 5,
    )
    # Sequentially: a x y z b EOS at positions 4..9, fed 3..8 tokens.
    assert sequential_cost(3, 6, 2) == Cost(
        steps=6, attended_tokens=4 + 5 + 6 + 7 + 8 + 9, peak_cached_tokens=9, block_steps=2 + 2 + 3 + 3 + 4 + 4
    )


@given(st.lists(st.integers(17, 40), max_size=40), st.integers(1, 20), st.sampled_from([1, 2, 16, 32]))
def test_an_answer_that_does_not_fork_costs_the_same_both_ways(tokens: list[int], prompt: int, block_size: int) -> None:
    assert wide_cost(prompt, [*tokens], block_size) == sequential_cost(prompt, len(tokens) + 1, block_size)


@given(scripts(), st.integers(1, 20))
def test_wide_costs_stay_within_what_the_threads_can_hold(script: Script, prompt: int) -> None:
    wide = wide_cost(prompt, script, 1)
    num_items = len(flatten(script)) + 3 * num_threads(script)  # [Fork], [Child] and EOS of every thread
    assert wide.peak_cached_tokens <= prompt + num_items
    assert wide.block_steps <= wide.steps * wide.peak_cached_tokens + wide.steps * num_threads(script)


def test_limits_of_two_requests() -> None:
    forked, plain = [30, [31, 32, 33], 34], [30, 31, 32]
    result = limits([(3, forked), (3, plain)], 2)  # type: ignore[list-item]
    assert (result.forked_share, result.mean_threads) == (0.5, 1.5)
    assert result.critical_path_saving == pytest.approx(1 - 10 / 10)
    assert result.attended_saving == pytest.approx(1 - (56 + 22) / (39 + 22))
    assert result.block_steps_bound == pytest.approx((18 + 10) / (22 + 10))


class FakeScheduler:
    """Two rows, one of which is preempted and comes back with 2 of its 5 tokens still cached."""

    def __init__(self) -> None:
        def new(name: str, prompt: int, computed: int) -> SimpleNamespace:
            return SimpleNamespace(req_id=name, prompt_token_ids=[1] * prompt, num_computed_tokens=computed)

        self.outputs = [
            self.output([new("a", 4, 0), new("b", 4, 0)], {}, {"a": 4, "b": 4}),
            self.output([new("a-1", 6, 4)], {"a": 4}, {"a": 1, "a-1": 2}),
            self.output([], {}, {}),
            self.output([], {"b": 2, "a-1": 6}, {"b": 2, "a-1": 1}),
            self.output([], {"b": 4, "a-1": 7}, {"b": 2, "a-1": 1}),
        ]

    @staticmethod
    def output(new: list[Any], cached: dict[str, int], scheduled: dict[str, int]) -> SimpleNamespace:
        rows = SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values()))
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=rows,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )

    def schedule(self) -> SimpleNamespace:
        return self.outputs.pop(0)

    def _preempt_request(self, request: SimpleNamespace) -> None:
        request.num_computed_tokens = 0


def test_steps_children_and_recomputation_are_counted() -> None:
    scheduler = FakeScheduler()
    with Watch(scheduler, {"a", "b"}) as log:
        scheduler.schedule()
        scheduler.schedule()
        scheduler._preempt_request(SimpleNamespace(request_id="b", num_computed_tokens=5))
        for _ in range(3):
            scheduler.schedule()
    assert (log.rows, log.tokens, log.context) == ([2, 2, 2, 2], [8, 3, 3, 3], [8, 11, 11, 14])
    assert (log.preemptions, log.recomputed_tokens) == (1, 3)
    assert (log.num_children, log.fork_prefill_tokens) == (1, 2)
    assert log.first_steps == {"a": 0, "b": 0}
    assert "schedule" not in vars(scheduler)


def outcome(outputs: list[list[int]], spans: list[tuple[int, int]], **log: Any) -> Outcome:
    return Outcome(1.0, outputs, ["stop"] * len(outputs), spans, [None] * len(outputs), StepLog(**log))


def test_no_figure_for_an_output_that_is_not_the_answer() -> None:
    requests = [Request([1, 2], [20, [21], 22], [20, 21, 22], EOS)]
    good = outcome([[20, 21, 22, EOS]], [(0, 4)], num_children=1)
    assert fault_of("apar", good, requests) is None
    assert "1 children ran" in str(fault_of("stock", good, requests))
    assert "differs from token 1" in str(fault_of("apar", outcome([[20, 22, 21, EOS]], [(0, 4)]), requests))
    assert "has 3 tokens" in str(fault_of("apar", outcome([[20, 21, 22]], [(0, 4)]), requests))


def test_a_projected_step_is_weights_rows_and_attention() -> None:
    gpu = gpu_of(["weights_gb=20", "bandwidth_gb_s=2000", "tflops=200", "row_us=100", "kv_kb_per_token=800"])
    assert gpu.step_s(10, 10, 1000) == pytest.approx(0.010 + 0.001 + 0.0004)
    assert gpu.step_s(10, 1000, 1000) == pytest.approx(0.100 + 0.001 + 0.0004)  # a large prefill is computed, not read
    assert gpu.kv_blocks(0.5, 32) == int(0.5 * 46e6 / (800 * 32))
    assert projected_times(StepLog(rows=[10, 10], tokens=[10, 10], context=[1000, 0]), gpu) == pytest.approx(
        [0.0, 0.0114, 0.0224]
    )


def test_a_point_counts_the_steady_state_only() -> None:
    # Six requests of 4 tokens, two at a time, a step of one second each: from the first third's end to the last start.
    spans = [(0, 4), (0, 4), (4, 8), (4, 8), (8, 12), (8, 12)]
    run = outcome([[1, 1, 1, EOS]] * 6, spans)
    result = point(7, run, [float(step) for step in range(13)])
    assert result == Point(kv_blocks=7, tokens_per_s=2.0, ms_per_token=1000.0, concurrency=2.0)


def test_where_forking_reaches_the_peak_of_stock() -> None:
    assert share_of_peak([0.1, 0.2, 0.3], [50, 80, 100], [60, 90, 110]) == pytest.approx(0.25)
    assert share_of_peak([0.1, 0.2], [50, 80], [90, 95]) == 0.1
    assert share_of_peak([0.1, 0.2], [50, 80], [60, 70]) is None


def test_latency_between_two_points() -> None:
    points = [Point(1, 1.0, 30.0, 10.0), Point(2, 1.0, 50.0, 20.0)]
    assert latency_at(15.0, points) == pytest.approx(40.0)
    assert latency_at(5.0, points) is None
    assert latency_at(25.0, points) is None


def answers_file(folder: Path) -> Path:
    prompts = [f"How do I do thing number {number}?" for number in range(6)]
    table = pa.table({"prompt": prompts, "response": [LIST, "A plain answer."] * 3, "model": ["m"] * 4 + ["other"] * 2})
    pq.write_table(table, folder / "answers.parquet")
    return folder / "answers.parquet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "model"], "COLUMN=VALUE"),
        (["--where", "colour=red"], "no column 'colour'"),
        (["--where", "model=nobody"], "no row"),
        (["--kv-blocks", "1"], "vLLM needs"),
        (["--kv-blocks", "many"], "neither a number"),
        (["--gpu", "row_us=fast"], "NAME=NUMBER"),
        (["--gpu", "rows=1"], "unknown"),
    ],
)
def test_bad_arguments_end_before_an_engine_starts(
    arguments: list[str], message: str, tmp_path: Path, smollm2_path: Path
) -> None:
    result = CliRunner().invoke(main, ["--answers", str(answers_file(tmp_path)), *arguments])
    assert result.exit_code != 0
    assert message in result.output


KEYS = """
    kv_blocks stock_s apar_s ratio stock_steps apar_steps step_ratio stock_preemptions apar_preemptions
    stock_recomputed apar_recomputed fork_prefill_tokens forked_share mean_threads peak_cached_saving attended_saving
    critical_path_saving block_steps_bound
"""


@pytest.mark.engine
def test_both_sides_of_a_small_file_and_both_curves(tmp_path: Path, smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.replay", "--answers", str(answers_file(tmp_path)), "--json"]
    command += ["--where", "model=m", "--kv-blocks", "2min", "--rows", "6", "--shape", "ghost", "--cpu-threads", "1"]
    command += ["--plot", str(tmp_path / "plots"), "--gpu-shares", "0.5", "--gpu-concurrency", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert list(line) == KEYS.split()
    assert (line["forked_share"], line["mean_threads"]) == (0.5, 2.5)
    # Six rows are over before forking pays; what they must show is that both sides ran and were counted.
    assert line["step_ratio"] == round(line["stock_steps"] / line["apar_steps"], 3) > 0.85
    assert line["fork_prefill_tokens"] <= 3 * 9
    for name in ("measured.png", "projected.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    projected = json.loads((tmp_path / "plots" / "projected.json").read_text())
    assert projected["gpu"] == vars(Gpu())
    assert [entry["share"] for entry in projected["shares"]] == [0.5]
