"""Everything else a request may ask of vLLM, on requests that fork: stops, aborts, logprobs, seeds, adapters, pools."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import Engine, Reference, greedy, receipt, stats, tokens_of
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

PROMPTS = random_prompts(16, seed=1)
M = 150


@pytest.fixture(scope="module")
def whole(shared: Engine) -> list[Any]:
    """Answers that nothing stops."""
    return shared.run(PROMPTS, greedy(M))


# --- [Child] ---


@pytest.mark.parametrize("bias", [None, {CHILD: 100.0, FORK: 2.0}], ids=["", "asked for"])
def test_child_is_never_sampled_and_fork_only_where_it_may_be(running: Engine, bias: dict[int, float] | None) -> None:
    prompts = random_prompts(20, seed=8)
    outputs = running.run(prompts, greedy(100, temperature=2.0, ignore_eos=True, logit_bias=bias))
    sampled = [(name, t) for step in running.watch.steps for name, tokens in step.sampled.items() for t in tokens]
    assert len(sampled) > 2000
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


def nodes_before(num_tokens: int, output: Any) -> list[tuple[Any, ...]]:
    """The nodes that begin before the so manieth token, cut there."""
    nodes = receipt(output)["nodes"]
    return [(*node[:3], node[4], min(node[5], num_tokens)) for node in nodes if node[4] < num_tokens]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_answer_where_it_is_read_first(running: Engine, whole: list[Any], include: bool) -> None:
    tokenizer = running.llm.get_tokenizer()

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    asked = [
        (prompt, output, place, piece)
        for prompt, output in zip(PROMPTS, whole, strict=True)
        for place, piece in stop_strings(output, decode)
    ]
    assert {place for _, _, place, _ in asked} >= {"root", "detail", "sibling", "end of a root", "end of a detail"}
    asked = asked[:30]
    params = [greedy(M, stop=[piece], include_stop_str_in_output=include) for _, _, _, piece in asked]
    outputs = running.run([prompt for prompt, *_ in asked], params)
    for (_, uncut, _, piece), output in zip(asked, outputs, strict=True):
        answer, text = output.outputs[0], uncut.outputs[0].text
        assert (answer.finish_reason, answer.stop_reason) == ("stop", piece)
        assert answer.text == text[: text.index(piece) + (len(piece) if include else 0)]
        num_tokens = len(answer.token_ids)
        assert 0 < num_tokens <= receipt(output)["nodes"][-1][5]  # the engine may be ahead of the text
        assert nodes_before(num_tokens, output) == nodes_before(num_tokens, uncut)


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


# --- Logprobs ---


def test_logprobs_come_in_restored_order(running: Engine, tiny_reference: Reference) -> None:
    params = [greedy(M, logprobs=[3, 1, 0, None][i % 4]) for i in range(8)]
    outputs = running.run(PROMPTS[:8], params)
    for prompt, own, output in zip(PROMPTS, params, outputs, strict=False):
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
    from vllm.sampling_params import RequestOutputKind

    params = greedy(M, temperature=1.0, seed=3, n=3, output_kind=RequestOutputKind.FINAL_ONLY)

    def sample() -> list[list[list[int]]]:
        outputs = running.run(PROMPTS[:6], params)
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]

    first = sample()
    assert all(len(answers) == 3 for answers in first)
    assert sum(a != b != c != a for a, b, c in first) > 3  # short ones may be the same
    assert sample() == first
    assert len(running.watch.finished) == 2 * 6 * 3


def test_a_seeded_answer_does_not_depend_on_its_neighbours(running: Engine) -> None:
    params = [greedy(M, temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    together = running.run(PROMPTS, params)
    assert sum(stats(output)["forks"] for output in together) > 10
    for prompt, own, output in list(zip(PROMPTS, params, together, strict=True))[:3]:
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


def test_a_bad_option_ends_that_request_alone(running: Engine) -> None:
    neighbours = PROMPTS[: len(BAD) + 1]
    prompts, params = [neighbours[0]], [greedy(60)]
    for bad, prompt in zip(BAD, neighbours[1:], strict=True):
        prompts += [prompt, prompt]
        params += [greedy(60, bad), greedy(60)]
    outputs = running.run(prompts, params)
    for bad, output in zip(BAD, outputs[1::2], strict=True):
        assert (output.outputs[0].finish_reason, tokens_of(output)) == ("error", []), bad
    for prompt, output in zip(neighbours, outputs[::2], strict=True):
        running.assert_expected(prompt, output, max_tokens=60)
    for bad in BAD:
        (alone,) = running.run(PROMPTS[:1], greedy(60, bad))
        assert alone.outputs[0].finish_reason == "error", bad


def test_eos_and_paths_stay_within_the_model(running: Engine, whole: list[Any]) -> None:
    for output in whole:
        tokens = tokens_of(output)
        assert EOS not in tokens[:-1]
        assert len(tokens) <= M < MAX_MODEL_LEN
