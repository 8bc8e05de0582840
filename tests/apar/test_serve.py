"""vLLM's unchanged server with our scheduler, started as docs/vllm-plugin.md says and asked by the `openai` client.

The model is tiny and real, the server is a process, its engine core another. Greedy answers have to equal the
sequential reference decoder's wherever they come out.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from serving import CONTROL, MODEL, Reference, differs, drained_metrics, metrics, serving, text_of, token_ids
from tiny_models import EOS, FORK, MAX_MODEL_LEN, make_tiny_model, random_prompts

from apar.options import ForkLimits
from apar.reference import ReferenceDecoder, greedy

pytestmark = pytest.mark.engine

ANSWER_TIMEOUT_S = 60.0
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
TOKEN_IDS = {"return_token_ids": True}
PROMPTS = random_prompts(12, seed=1)
TEXTS = ["Hello", "What is a cat?", "Name three colours.", "List the planets", "a", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder, folder.parent / "serve.log") as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def long(reference: Reference) -> list[int]:
    """A prompt whose answer is long and forks more than once."""
    for prompt in random_prompts(100, seed=9):
        answer = reference(prompt, max_tokens=300)
        if len(answer.token_ids) == 300 and answer.num_forks > 2 and answer.nodes[1].end > answer.nodes[1].start:
            return prompt
    raise AssertionError("no such prompt")


def chat_tokens(text: str) -> list[int]:
    return token_ids(text + "\n")  # the tiny models' chat template


def receipt(answer: Any) -> dict[str, Any]:
    return dict(answer.kv_transfer_params["apar"])


def tokens_of(answer: Completion) -> list[list[int]]:
    choices: list[Any] = list(answer.choices)
    return [choice.token_ids for choice in choices]


# --- whole answers ---


def test_the_prompts_fork_nest_and_end_in_every_way(reference: Reference) -> None:
    results = [reference(prompt, max_tokens=200) for prompt in PROMPTS]
    assert {result.finish_reason for result in results} == {"stop", "length"}
    assert max(result.num_forks for result in results) > 3
    assert max(len(thread.address) for result in results for thread in result.threads) == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 50, 200])
def test_completions_equal_the_reference(client: openai.OpenAI, reference: Reference, max_tokens: int) -> None:
    for prompt in PROMPTS:
        answer = client.completions.create(prompt=prompt, max_tokens=max_tokens, extra_body=TOKEN_IDS, **GREEDY)
        expected = reference(prompt, max_tokens=max_tokens)
        choice: Any = answer.choices[0]
        assert choice.token_ids == expected.token_ids
        assert choice.text == text_of(expected.token_ids)
        assert choice.finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.prompt_tokens == len(prompt)


def test_a_batch_of_prompts_in_one_request_equals_the_reference(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.completions.create(prompt=PROMPTS, max_tokens=200, extra_body=TOKEN_IDS, **GREEDY)
    got: list[Any] = sorted(answer.choices, key=lambda choice: choice.index)
    assert [choice.token_ids for choice in got] == [reference(p, max_tokens=200).token_ids for p in PROMPTS]


@pytest.mark.parametrize("text", TEXTS)
def test_chat_equals_the_reference(client: openai.OpenAI, reference: Reference, text: str) -> None:
    answer = client.chat.completions.create(messages=[{"role": "user", "content": text}], max_tokens=150, **GREEDY)
    expected = reference(chat_tokens(text), max_tokens=150)
    assert answer.choices[0].message.content == text_of(expected.token_ids)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_the_receipt_comes_with_the_answer(client: openai.OpenAI, reference: Reference, long: list[int]) -> None:
    for prompt in PROMPTS:
        answer = client.completions.create(prompt=prompt, max_tokens=200, **GREEDY)
        expected, got = reference(prompt, max_tokens=200), receipt(answer)
        assert not differs(got, expected)
        assert got["stats"]["sequential_peak_tokens"] == len(prompt) + len(expected.token_ids)
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": text_of(long)}], max_tokens=300, **GREEDY
    )
    assert receipt(chat)["stats"]["forks"] == reference(chat_tokens(text_of(long)), max_tokens=300).num_forks > 0


# --- streams ---


def joined(stream: Any) -> tuple[str, list[int], str | None, int]:
    """Text, token ids, finish reason and counted tokens of a stream of completions."""
    text, reason, num_tokens = "", None, -1
    tokens: list[int] = []
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.text
            tokens += choice.token_ids or []
            reason = choice.finish_reason or reason
    return text, tokens, reason, num_tokens


@pytest.mark.parametrize("max_tokens", [1, 50, 200])
def test_streamed_pieces_are_the_whole_answer(client: openai.OpenAI, reference: Reference, max_tokens: int) -> None:
    usage: Any = {"include_usage": True}
    for prompt in PROMPTS:
        stream = client.completions.create(
            prompt=prompt, max_tokens=max_tokens, stream=True, stream_options=usage, extra_body=TOKEN_IDS, **GREEDY
        )
        expected = reference(prompt, max_tokens=max_tokens)
        text, tokens, reason, num_tokens = joined(stream)
        assert (text, tokens, reason) == (text_of(expected.token_ids), expected.token_ids, expected.finish_reason)
        assert num_tokens == len(expected.token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_chat_is_the_whole_answer(client: openai.OpenAI, reference: Reference, text: str) -> None:
    stream: Any = client.chat.completions.create(
        messages=[{"role": "user", "content": text}], max_tokens=150, stream=True, **GREEDY
    )
    pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == text_of(reference(chat_tokens(text), max_tokens=150).token_ids)
    for piece in pieces:
        assert "[Fork]" not in piece
        assert "[Child]" not in piece


def test_an_answer_that_forks_is_streamed_while_it_is_written(client: openai.OpenAI, long: list[int]) -> None:
    stream = client.completions.create(prompt=long, max_tokens=300, stream=True, **GREEDY)
    assert len([chunk for chunk in stream if chunk.choices and chunk.choices[0].text]) > 30


def test_sixteen_streams_at_once_equal_the_reference(server: str, reference: Reference) -> None:
    prompts = random_prompts(16, seed=1)

    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> list[int]:
        stream: Any = await client.completions.create(
            prompt=prompt, max_tokens=200, stream=True, extra_body=TOKEN_IDS, **GREEDY
        )
        return [token async for chunk in stream for choice in chunk.choices for token in choice.token_ids or []]

    async def all_of_them() -> list[list[int]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == [reference(prompt, max_tokens=200).token_ids for prompt in prompts]


# --- what a request may ask for ---


def test_a_stop_string_ends_the_answer_where_it_stands(
    server: str, client: openai.OpenAI, reference: Reference, long: list[int]
) -> None:
    text = text_of(reference(long, max_tokens=300).token_ids)
    for at in (5, 60, 150):
        stop = text[at : at + 3]
        answer = client.completions.create(prompt=long, max_tokens=300, stop=[stop], extra_body=TOKEN_IDS, **GREEDY)
        choice: Any = answer.choices[0]
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        assert choice.stop_reason == stop
        assert answer.usage is not None
        stats = receipt(answer)["stats"]
        assert stats["sequential_peak_tokens"] == len(long) + answer.usage.completion_tokens
    drained_metrics(server)


def test_a_stop_token_ends_the_answer_in_whichever_thread(
    client: openai.OpenAI, reference: Reference, long: list[int]
) -> None:
    whole = reference(long, max_tokens=300)
    details = [node for node in whole.nodes if node.kind == "detail" and node.end > node.start]
    stop = whole.token_ids[details[0].end - 1]
    expected = reference(long, max_tokens=300, stop_token_ids=[stop])
    answer = client.completions.create(
        prompt=long, max_tokens=300, extra_body={**TOKEN_IDS, "stop_token_ids": [stop]}, **GREEDY
    )
    choice: Any = answer.choices[0]
    assert (choice.token_ids, choice.finish_reason) == (expected.token_ids, "stop")
    assert choice.stop_reason == stop


class Recorder:
    """The model, with the log probabilities after every call kept."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, **arguments: Any) -> Any:
        output = self._model(**arguments)
        self.logprobs.append(output.logits[0, -1].float().log_softmax(-1))
        return output


def test_logprobs_are_those_of_each_tokens_own_path(
    client: openai.OpenAI, reference: Reference, long: list[int]
) -> None:
    recorder, sampled = Recorder(reference.model), list[int]()

    def choose(logits_v: torch.Tensor) -> int:
        sampled.append(greedy(logits_v))
        return sampled[-1]

    decoder = ReferenceDecoder(recorder, CONTROL, ForkLimits(), [EOS], MAX_MODEL_LEN, choose)
    expected = decoder.decode(long, max_tokens=200)
    kept = [i for i, token in enumerate(sampled) if token not in (FORK, EOS)]
    assert [sampled[i] for i in kept] == expected.token_ids
    answer = client.completions.create(prompt=long, max_tokens=200, logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([float(recorder.logprobs[i][sampled[i]]) for i in kept], abs=2e-3)
    assert all(top is not None and len(top) >= 3 for top in logprobs.top_logprobs or [None])
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": text_of(long)}], max_tokens=50, logprobs=True, top_logprobs=2, **GREEDY
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    spelled = "".join(token.token for token in told.content)
    assert spelled.replace("<unk>", "") == chat.choices[0].message.content


def test_a_seed_decides_the_answer_whoever_runs_beside_it(client: openai.OpenAI, long: list[int]) -> None:
    def sample(seed: int, prompt: Any = long, n: int = 1) -> list[list[int]]:
        return tokens_of(
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=150, temperature=0.8, seed=seed, n=n, extra_body=TOKEN_IDS
            )
        )

    alone = sample(7)
    assert sample(7) == alone
    assert sample(8) != alone
    assert sample(7, [long, *PROMPTS])[:1] == alone
    # Two samples are two answers, each as if asked for by itself: vLLM gives the second the next seed.
    assert sample(7, n=2) == [*alone, *sample(8)]


@pytest.mark.parametrize("value", [False, 0])
def test_a_request_may_ask_not_to_fork(
    client: openai.OpenAI, reference: Reference, value: Any, long: list[int]
) -> None:
    answer = client.completions.create(
        prompt=long, max_tokens=100, extra_body={**TOKEN_IDS, "vllm_xargs": {"apar": value}}, **GREEDY
    )
    assert tokens_of(answer) == [reference(long, max_tokens=100, fork=False).token_ids]
    assert receipt(answer)["stats"]["threads"] == 1


def test_a_request_may_lower_a_limit_with_json_text_since_vllm_takes_no_mapping(
    client: openai.OpenAI, reference: Reference, long: list[int]
) -> None:
    answer = client.completions.create(
        prompt=long, max_tokens=300, extra_body={**TOKEN_IDS, "vllm_xargs": {"apar": '{"max_depth": 1}'}}, **GREEDY
    )
    assert tokens_of(answer) == [reference(long, max_tokens=300, limits=ForkLimits(max_depth=1)).token_ids]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=long, extra_body={"vllm_xargs": {"apar": {"max_depth": 1}}}, **GREEDY)


def test_a_wrong_option_fails_its_own_request_only(
    client: openai.OpenAI, reference: Reference, long: list[int]
) -> None:
    with pytest.raises(openai.APIStatusError):
        client.completions.create(prompt=long, max_tokens=20, extra_body={"vllm_xargs": {"apar": "sideways"}}, **GREEDY)
    answer = client.completions.create(prompt=long, max_tokens=20, extra_body=TOKEN_IDS, **GREEDY)
    assert tokens_of(answer) == [reference(long, max_tokens=20).token_ids]


# --- going away ---


def test_a_client_that_goes_away_ends_all_threads_of_its_request(
    server: str, client: openai.OpenAI, long: list[int]
) -> None:
    before = drained_metrics(server)["vllm:generation_tokens_total"]
    streams = [
        client.completions.create(prompt=prompt, max_tokens=480, stream=True, model=MODEL, temperature=0.0)
        for prompt in [long] * 4
    ]
    for stream in streams:
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
    assert metrics(server)["vllm:num_requests_running"] >= 1
    for stream in streams:
        stream.close()
    assert drained_metrics(server)["vllm:generation_tokens_total"] - before < 4 * 400
