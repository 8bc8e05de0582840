"""Everything else a request may ask of vLLM, on requests that fork: stops, aborts, logprobs, seeds, adapters, pools."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ROOMY, TIGHT, Engine, Reference, engine, greedy, receipt, stats
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

PROMPTS = random_prompts(16, seed=1)
M = 150


@pytest.fixture(scope="module", params=[ROOMY, TIGHT], ids=["roomy", "tight"])
def shared(
    request: pytest.FixtureRequest, in_process: None, tiny_folder: Path, tiny_reference: Reference
) -> Iterator[Engine]:
    with engine(tiny_folder, request.param, tiny_reference) as started:
        yield started


@pytest.fixture
def running(shared: Engine) -> Iterator[Engine]:
    yield from watched(shared)


def watched(started: Engine) -> Iterator[Engine]:
    started.watch.clear()
    try:
        yield started
        started.assert_empty()
    finally:
        started.reset()


@pytest.fixture(scope="module")
def whole(shared: Engine) -> list[Any]:
    """Answers that nothing stops."""
    return shared.run(PROMPTS, greedy(M))


def forked(outputs: list[Any]) -> list[Any]:
    found = [output for output in outputs if len(receipt(output)["nodes"]) > 3]
    assert len(found) > 2
    return found


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


# --- [Child] ---


@pytest.mark.parametrize("temperature", [5.0, 100.0])
def test_child_is_never_sampled_and_fork_only_where_it_may_be(running: Engine, temperature: float) -> None:
    prompts = random_prompts(30, seed=8)
    outputs = running.run(prompts, greedy(200, temperature=temperature, ignore_eos=True))
    sampled = [(name, t) for step in running.watch.steps for name, tokens in step.sampled.items() for t in tokens]
    assert len(sampled) > 5000
    depth = {name: prompt.count(CHILD) for name, prompt in running.watch.prompts.items()}
    assert max(depth.values()) == 2
    assert not [name for name, token in sampled if token == CHILD]
    assert not [name for name, token in sampled if token == FORK and depth[name] == 2]
    assert all({FORK, CHILD}.isdisjoint(tokens_of(output)) for output in outputs)


# --- Stops ---


def stop_strings(output: Any, decode: Callable[[list[int]], str]) -> Iterator[tuple[str, str]]:
    """Per kind of place: a stop string that comes there first."""
    text, tokens = output.outputs[0].text, tokens_of(output)
    for _, _, kind, _, start, end, *_ in receipt(output)["nodes"]:
        before, behind = len(decode(tokens[:start])), len(decode(tokens[:end]))
        places = [(kind, range(before, behind - 1))] + ([(f"end of a {kind}", [behind - 1])] if end > start else [])
        for place, positions in places:
            for at in positions:
                piece = text[at : at + 2]
                if len(piece) == 2 and text.find(piece) == at:
                    yield place, piece
                    break


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_answer_where_it_is_read_first(running: Engine, whole: list[Any], include: bool) -> None:
    tokenizer = running.llm.get_tokenizer()

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    asked = [
        (prompt, output.outputs[0].text, place, piece)
        for prompt, output in zip(PROMPTS, whole, strict=True)
        for place, piece in stop_strings(output, decode)
    ]
    assert {place for _, _, place, _ in asked} >= {"root", "detail", "sibling", "end of a root", "end of a detail"}
    asked = asked[:60]
    params = [greedy(M, stop=[piece], include_stop_str_in_output=include) for _, _, _, piece in asked]
    outputs = running.run([prompt for prompt, *_ in asked], params)
    for (_, text, _, piece), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", piece)
        assert answer.text == text[: text.index(piece) + (len(piece) if include else 0)]
        assert receipt(output)["nodes"][-1][5] == len(answer.token_ids)
        assert stats(output)["sequential_peak_tokens"] == len(output.prompt_token_ids) + len(answer.token_ids)


def test_a_stop_token_in_a_detail_cuts_in_restored_order(running: Engine, whole: list[Any]) -> None:
    prompts, stops = [], []
    for prompt, output in zip(PROMPTS, whole, strict=True):
        tokens = tokens_of(output)
        for _, _, kind, _, start, end, *_ in receipt(output)["nodes"]:
            fresh = [token for token in tokens[start:end] if token not in tokens[:start]]
            if kind == "detail" and fresh:
                prompts.append(prompt)
                stops.append(fresh[-1])
    assert len(prompts) > 5
    outputs = running.run(prompts, [greedy(M, stop_token_ids=[token]) for token in stops])
    for prompt, token, output in zip(prompts, stops, outputs, strict=True):
        running.assert_expected(prompt, output, max_tokens=M, stop_token_ids=(token,))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", token)


# --- Aborts ---


def state_of(running: Engine, name: str) -> tuple[bool, list[str]]:
    """Whether the root thread has ended, and the status of each child that has not."""
    root = running.internal[name]
    requests = running.scheduler.requests
    children = [str(request.status.name) for key, request in requests.items() if key.startswith(f"{root}#")]
    return root not in requests, children


STAGES: dict[str, Callable[[bool, list[str]], bool]] = {
    "before it starts": lambda ended, children: True,
    "while a child waits": lambda ended, children: "WAITING" in children,
    "while children run": lambda ended, children: "RUNNING" in children,
    "after the root thread ended": lambda ended, children: ended and bool(children),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_width", [2, 32])
def test_an_abort_leaves_the_others_right_and_nothing_behind(running: Engine, stage: str, max_width: int) -> None:
    names = [running.add(prompt, greedy(M, {"max_width": max_width})) for prompt in PROMPTS]
    aborted: set[str] = set()
    last: dict[str, Any] = {}
    for _ in range(3000):
        for name in names:
            in_time = name not in aborted and name not in last and len(aborted) < len(names) // 2
            if in_time and STAGES[stage](*state_of(running, name)):
                running.llm.abort_request([name])
                aborted.add(name)
        if not running.llm.has_unfinished_requests():
            break
        last.update({output.request_id: output for output in running.step() if output.finished})
    running.finish()
    assert aborted
    assert set(last) == set(names) - aborted
    for prompt, name in zip(PROMPTS, names, strict=True):
        if name in last:
            running.assert_expected(prompt, last[name], max_tokens=M)


@pytest.mark.parametrize("first", range(0, 45, 9))
def test_aborts_at_any_step(running: Engine, first: int) -> None:
    names = [running.add(prompt, greedy(M)) for prompt in PROMPTS]
    last: dict[str, Any] = {}
    aborted: set[str] = set()
    for step in range(200):
        if step >= first and step % 3 == 0 and len(aborted) < 12:
            running.llm.abort_request([names[len(aborted)]])
            aborted.add(names[len(aborted)])
        last.update({output.request_id: output for output in running.step() if output.finished})
    last.update(running.finish())
    for prompt, name in zip(PROMPTS, names, strict=True):
        if name in last:
            running.assert_expected(prompt, last[name], max_tokens=M)


def test_all_requests_aborted_at_once_leave_an_idle_engine(running: Engine) -> None:
    from vllm.v1.request import RequestStatus

    for steps in (1, 5, 20, 40):
        for prompt in PROMPTS:
            running.add(prompt, greedy(M))
        for _ in range(steps):
            running.step()
        unfinished = set(running.internal.values()) - set(running.watch.finished)
        ended = running.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert {request.request_id for request in ended} == unfinished
        running.llm.abort_request(list(running.internal))
        running.finish()
        running.assert_empty()
        running.internal.clear()
        running.watch.clear()


def test_a_reset_of_the_prefix_cache_in_the_middle_changes_no_token(running: Engine) -> None:
    names = [running.add(prompt, greedy(M)) for prompt in PROMPTS]
    last: dict[str, Any] = {}
    for step in range(60):
        last.update({output.request_id: output for output in running.step() if output.finished})
        if step % 7 == 6:
            assert running.scheduler.reset_prefix_cache(reset_running_requests=True)
    last.update(running.finish())
    for prompt, name in zip(PROMPTS, names, strict=True):
        running.assert_expected(prompt, last[name], max_tokens=M)


# --- Logprobs ---


def test_logprobs_come_in_restored_order(running: Engine, tiny_reference: Reference) -> None:
    params = [greedy(M, logprobs=[3, 1, 0, None][i % 4]) for i in range(len(PROMPTS))]
    outputs = running.run(PROMPTS, params)
    for prompt, own, output in zip(PROMPTS, params, outputs, strict=True):
        if not running.assert_expected(prompt, output, max_tokens=M):
            continue
        answer = output.outputs[0]
        if own.logprobs is None:
            assert answer.logprobs is None
            continue
        rows = tiny_reference.rows(prompt, max_tokens=M)
        assert len(answer.logprobs) == len(answer.token_ids) == len(rows)
        for token, found, row in zip(answer.token_ids, answer.logprobs, rows, strict=True):
            assert token in found
            assert own.logprobs <= len(found) <= own.logprobs + 1
            for key, value in found.items():
                assert value.logprob == pytest.approx(float(row[key]), abs=2e-3)
            best = row.topk(own.logprobs).indices.tolist() if own.logprobs else []
            assert {key for key, value in found.items() if value.rank <= own.logprobs} == set(best)


def test_prompt_logprobs_are_the_prompts_own(running: Engine, tiny_reference: Reference) -> None:
    outputs = running.run(PROMPTS, greedy(60, prompt_logprobs=2))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        running.assert_expected(prompt, output, max_tokens=60)
        assert len(output.prompt_logprobs) == len(prompt)
        with torch.inference_mode():
            rows = tiny_reference.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        for token, found, row in zip(prompt[1:], output.prompt_logprobs[1:], rows[:-1], strict=True):
            assert found[token].logprob == pytest.approx(float(row[token]), abs=2e-3)


# --- Sampling ---


def test_samples_of_a_request_are_groups_of_their_own(running: Engine) -> None:
    def sample() -> list[list[list[int]]]:
        outputs = running.run(PROMPTS[:6], greedy(M, temperature=1.0, seed=3, n=3))
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]

    first = sample()
    assert all(len(answers) == 3 for answers in first)
    assert all(a != b != c != a for a, b, c in first)
    assert sample() == first
    assert len(running.watch.finished) == 2 * 6 * 3


def test_a_seeded_answer_does_not_depend_on_its_neighbours(running: Engine) -> None:
    params = [greedy(M, temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    together = running.run(PROMPTS, params)
    assert sum(stats(output)["forks"] for output in together) > 10
    for prompt, own, output in list(zip(PROMPTS, params, together, strict=True))[:6]:
        (alone,) = running.run([prompt], own)
        assert tokens_of(alone) == tokens_of(output)
        assert [n[:6] for n in receipt(alone)["nodes"]] == [n[:6] for n in receipt(output)["nodes"]] or (
            [(*n[:3], *n[4:6]) for n in receipt(alone)["nodes"]]
            == [(*n[:3], *n[4:6]) for n in receipt(output)["nodes"]]
        )
        (other,) = running.run([prompt], greedy(M, temperature=0.9, seed=own.seed + 100))
        assert tokens_of(other) != tokens_of(output)


def test_unseeded_sampling_works(running: Engine) -> None:
    outputs = running.run(PROMPTS * 2, greedy(M, temperature=1.0, top_k=30, top_p=0.9))
    assert sum(stats(output)["forks"] for output in outputs) > 10
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


# --- Structured output ---


def test_structured_output_does_not_fork_and_is_valid_beside_requests_that_do(running: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    wanted: list[dict[str, Any]] = [
        {"choice": ["red", "green"]},
        {"regex": "[ab]{3}c"},
        {"json": {**schema, "additionalProperties": False}},
    ]
    guided = [greedy(60, structured_outputs=StructuredOutputsParams(**each)) for each in wanted]
    free = [greedy(M)] * len(PROMPTS)
    outputs = running.run([*PROMPTS[:8], *PROMPTS[:3], *PROMPTS[8:]], [*free[:8], *guided, *free[8:]])
    choice, regex, found = outputs[8:11]
    assert choice.outputs[0].text in ("red", "green")
    assert len(regex.outputs[0].text) == 4
    assert set(regex.outputs[0].text[:3]) <= {"a", "b"}
    assert list(json.loads(found.outputs[0].text)) == ["n"]
    assert all(stats(output)["forks"] == 0 for output in outputs[8:11])
    for prompt, output in zip(PROMPTS, [*outputs[:8], *outputs[11:]], strict=True):
        running.assert_expected(prompt, output, max_tokens=M)


# --- Bad options ---

BAD: list[Any] = [
    {"max_widht": 3},
    {"max_width": 0},
    {"max_forks": "many"},
    {"max_depth": 1.5},
    {"pool_share": 2},
    {"pool_share": "half"},
    {"pool": 7},
    {"pool": ["a"]},
    {"fork": "no"},
    "yes",
    [1, 2],
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_option_ends_that_request_alone(running: Engine, bad: Any) -> None:
    prompts = PROMPTS[:3]
    first, wrong, second = running.run(prompts, [greedy(60), greedy(60, bad), greedy(60)])
    assert wrong.outputs[0].finish_reason == "error"
    assert tokens_of(wrong) == []
    running.assert_expected(prompts[0], first, max_tokens=60)
    running.assert_expected(prompts[2], second, max_tokens=60)
    (wrong,) = running.run(prompts[:1], greedy(60, bad))
    assert wrong.outputs[0].finish_reason == "error"


# --- Pools and priorities ---


def test_a_pool_at_its_share_holds_no_more_while_another_waits(tiny_folder: Path, tiny_reference: Reference) -> None:
    num_blocks, share = 40, 0.25
    held: list[int] = []
    with engine(tiny_folder, num_blocks, tiny_reference) as started:
        small: set[str] = set()
        large: set[str] = set()

        waited = False

        def look(scheduler: Any) -> None:
            nonlocal waited
            blocks: set[int] = set()
            mine = [r.request_id for r in scheduler.running if r.request_id.split("#")[0] in small]
            for name in mine:
                blocks.update(scheduler.kv_cache_manager.get_block_ids(name)[0])
            waits = any(
                name.split("#")[0] in large and request.status.name != "RUNNING"
                for name, request in scheduler.requests.items()
            )
            if waits and waited and len(mine) > 1:
                held.append(len(blocks) - len(mine))  # a step's growth is given back before the next step
            waited = waits

        started.watch.on_step = look
        prompts = random_prompts(40, seed=3, min_tokens=40, max_tokens=90)
        names = []
        for i, prompt in enumerate(prompts):
            apar = {"pool": "small", "pool_share": share} if i % 2 else {"pool": "large", "pool_share": 1.0}
            names.append(started.add(prompt, greedy(M, apar)))
            (small if i % 2 else large).add(started.internal[names[-1]])
        outputs = started.finish()
        assert len(held) > 20
        assert max(held) <= share * num_blocks
        for prompt, name in zip(prompts, names, strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        started.assert_empty()


def test_priorities_go_first_and_change_no_token(tiny_folder: Path, tiny_reference: Reference) -> None:
    with engine(tiny_folder, TIGHT, tiny_reference, scheduling_policy="priority") as started:
        prompts = random_prompts(24, seed=3, min_tokens=30, max_tokens=60)
        late = [started.add(prompt, greedy(M), priority=5) for prompt in prompts[:12]]
        for _ in range(5):
            started.step()
        early = [started.add(prompt, greedy(M), priority=-1) for prompt in prompts[12:]]
        outputs = started.finish()
        for prompt, name in zip(prompts, [*late, *early], strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        ended = [started.watch.finished.index(started.internal[name]) for name in (*late, *early)]
        assert sum(ended[12:]) < sum(ended[:12])
        started.assert_empty()


# --- Seeds and chunks ---


def test_seeded_requests_and_chunked_prefill_do_not_kill_the_engine(tiny_folder: Path) -> None:
    """On CPU vLLM cannot wind a generator back, so a seeded prefill must not be split."""
    with engine(tiny_folder, ROOMY, max_num_batched_tokens=80, max_num_seqs=32) as started:
        prompts = random_prompts(30, seed=5, max_tokens=75)
        params = [greedy(60, temperature=0.8, seed=i if i % 3 else None) for i in range(30)]
        outputs = started.run(prompts, params)
        assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
        for i in (1, 4, 8):
            (alone,) = started.run([prompts[i]], params[i])
            assert tokens_of(alone) == tokens_of(outputs[i])
        long = random_prompts(1, seed=6, min_tokens=200, max_tokens=200)
        refused, *others = started.run([*long, *prompts[:6]], greedy(20, temperature=0.8, seed=1))
        assert refused.outputs[0].finish_reason == "error"
        assert all(output.outputs[0].finish_reason in ("stop", "length") for output in others)
        started.assert_empty()


# --- LoRA ---


def write_adapter(folder: Path, model: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random adapter as peft writes it, and what it adds to each weight."""
    from safetensors.torch import save_file

    folder.mkdir()
    rank, alpha = 4, 8
    generator = torch.Generator().manual_seed(1)
    tensors, added = {}, {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("q_proj", "v_proj", "o_proj", "down_proj"):
            a = torch.randn(rank, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, rank, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            added[f"{name}.weight"] = b @ a * (alpha / rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "base_model_name_or_path": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, added


def test_children_keep_their_parents_adapter(tiny_folder: Path, tiny_reference: Reference, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    merged = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    adapter, added = write_adapter(tmp_path / "adapter", merged)
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            weight += added.get(name, 0.0)
    reference = Reference(merged)
    with engine(tiny_folder, TIGHT, reference, enable_lora=True, max_lora_rank=8, max_loras=1) as started:
        request = LoRARequest("random", 1, str(adapter))
        with_it = [started.add(prompt, greedy(M), lora_request=request) for prompt in PROMPTS]
        without = [started.add(prompt, greedy(M)) for prompt in PROMPTS[:8]]
        outputs = started.finish()
        for prompt, name in zip(PROMPTS, with_it, strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        forked([outputs[name] for name in with_it])
        started.reference = tiny_reference
        for prompt, name in zip(PROMPTS, without, strict=False):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        started.assert_empty()


def test_eos_and_paths_stay_within_the_model(running: Engine, whole: list[Any]) -> None:
    for output in whole:
        tokens = tokens_of(output)
        assert EOS not in tokens[:-1]
        assert len(tokens) <= M < MAX_MODEL_LEN
