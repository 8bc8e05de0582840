"""The real vLLM engine on the CPU with the real small model in float32: one engine for the whole module, whose KV
budget is so small that requests push each other out."""

import itertools
import queue
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jobs.sampling import Sampling
from jobs.settings import KVBudget, ModelAlias
from worker.backend import EngineDead, Finished, Refused, Sample
from worker.engine import VllmBackend
from worker.generation import too_long
from worker.prompts import PromptEncoder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_BLOCKS, BLOCK_SIZE = 12, 32
PATIENCE_S = 240.0
_numbers = itertools.count()
QUESTIONS = ["What is the capital of France?", "Name three fruits.", "Why is the sky blue?", "Say hello in Spanish."]


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> Iterator[VllmBackend]:
    alias = ModelAlias(
        path=smollm2_path,
        dtype="float32",
        max_model_len=2048,
        kv_budget=KVBudget.parse(f"{NUM_BLOCKS} blocks"),
        engine={"max_num_seqs": 16},
    )
    backend = VllmBackend(alias, str(smollm2_path))
    backend.start()
    yield backend
    backend.shutdown()


@pytest.fixture(scope="module")
def encoder(smollm2_path: Path) -> PromptEncoder:
    return PromptEncoder.load(smollm2_path)


class Asker:
    """Hands samples in under keys of their own and waits for their answers."""

    def __init__(self, backend: VllmBackend, encoder: PromptEncoder) -> None:
        self.backend = backend
        self.answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
        self._encoder = encoder

    def sample(self, text: str | list[int], max_tokens: int = 16, seed: int | None = None, **values: Any) -> Sample:
        ids = self._encoder.encode_prompt(text) if isinstance(text, str) else text
        sampling = Sampling.model_construct(**{"temperature": 0.0, **values})
        return Sample(f"sample-{next(_numbers)}", ids, sampling, max_tokens, seed)

    def start(self, *samples: Sample) -> None:
        self.backend.submit(samples, self.answers.put)

    def wait(self, number: int) -> dict[str, Finished | Refused]:
        found = {}
        for _ in range(number):
            answer = self.answers.get(timeout=PATIENCE_S)
            assert answer.key not in found, "reported twice"
            found[answer.key] = answer
        return found

    def ask(self, *samples: Sample) -> list[Any]:
        self.start(*samples)
        found = self.wait(len(samples))
        return [found[sample.key] for sample in samples]


@pytest.fixture
def asker(backend: VllmBackend, encoder: PromptEncoder) -> Asker:
    return Asker(backend, encoder)


def eventually_idle(backend: VllmBackend) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while backend.num_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.num_unfinished == 0


def test_the_engine_says_what_it_holds_and_the_small_budget_shrinks_the_context(backend: VllmBackend) -> None:
    facts = backend.facts
    assert (facts.num_blocks, facts.block_size, facts.max_num_seqs) == (NUM_BLOCKS, BLOCK_SIZE, 16)
    assert facts.max_model_len == NUM_BLOCKS * BLOCK_SIZE
    assert facts.context_len > facts.max_model_len
    assert "the KV budget is 12: raise kv_budget" in (too_long(NUM_BLOCKS * BLOCK_SIZE, facts) or "")


def test_greedy_answers_are_those_of_transformers_alone_and_in_a_batch(asker: Asker, smollm2_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    samples = [asker.sample(question) for question in QUESTIONS]
    together = asker.ask(*samples)
    alone = [asker.ask(asker.sample(question))[0] for question in QUESTIONS]
    assert [answer.text for answer in alone] == [answer.text for answer in together]

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    for sample, answer in list(zip(samples, together, strict=True))[:2]:  # the reference is slow
        prompt = torch.tensor([sample.token_ids])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
        expected = ids[0, prompt.shape[1] :]
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert list(answer.token_ids) == expected.tolist()
        assert answer.finish_reason == ("stop" if expected[-1] == tokenizer.eos_token_id else "length")


def test_a_token_a_step_when_nothing_is_in_the_way(asker: Asker) -> None:
    for number in (20, 1):
        sample = asker.sample("Count to one hundred.", max_tokens=number)
        (answer,) = asker.ask(sample)
        prompt, attended = len(sample.token_ids), sum(len(sample.token_ids) + i for i in range(1, number + 1))
        # The last token's own keys and values are never computed.
        peak = prompt + number - 1
        assert asdict(answer.receipt.stats) == {
            "threads": 1, "forks": 0, "max_width": 1, "steps": number, "peak_cached_tokens": peak,
            "peak_blocks": -(-peak // BLOCK_SIZE), "attended_tokens": attended,
            "sequential_peak_tokens": prompt + number, "sequential_attended_tokens": attended, "preemptions": 0,
            "forwards": None, "hit_rate": None, "acceptance_length": None, "decoding_efficiency": None,
            "draft_nodes": None, "verify_nodes": None,
        }  # fmt: skip
        assert answer.receipt.spans == ((0, None, "root", 0, 0, number, 0, number - 1),)


def test_requests_that_push_each_other_out_are_counted_and_all_answered(asker: Asker) -> None:
    # Each grows to 4 or 5 blocks of the 12; eight of them cannot stay together.
    samples = [asker.sample(f"Tell me a long story about the number {n}.", max_tokens=100) for n in range(8)]
    answers = asker.ask(*samples)
    assert all(isinstance(answer, Finished) and answer.text for answer in answers)
    assert sum(answer.receipt.stats.preemptions for answer in answers) > 0
    for answer in answers:
        stats = answer.receipt.stats
        assert stats.steps >= len(answer.token_ids) > 0
        assert stats.preemptions == 0 or stats.steps > len(answer.token_ids)
    # Pushed out or not, the answer is the same.
    pushed = next(n for n, answer in enumerate(answers) if answer.receipt.stats.preemptions)
    (alone,) = asker.ask(asker.sample(f"Tell me a long story about the number {pushed}.", max_tokens=100))
    assert alone.text == answers[pushed].text
    assert (alone.receipt.stats.preemptions, alone.receipt.stats.steps) == (0, len(alone.token_ids))


def test_an_aborted_request_leaves_the_engine_and_is_not_reported(asker: Asker) -> None:
    long = asker.sample("Count to one thousand.", max_tokens=300)
    asker.start(long)
    asker.backend.abort([long.key, "a key that nobody knows"])
    eventually_idle(asker.backend)
    # Its blocks are free again: this one needs them all.
    (answer,) = asker.ask(asker.sample([28] * (NUM_BLOCKS * BLOCK_SIZE - 2), max_tokens=2, ignore_eos=True))
    assert isinstance(answer, Finished)
    assert asker.answers.empty()


@pytest.mark.parametrize(
    "bad",
    [
        {"text": [28] * (NUM_BLOCKS * BLOCK_SIZE + 1)},
        {"text": []},
        {"text": [49152 + 7]},
        {"text": [28], "top_p": 7.0},
        {"text": [28], "temperature": float("nan")},
        {"text": [28], "stop": [""]},
    ],
    ids=["too long", "no tokens", "token out of the vocabulary", "top_p", "nan", "empty stop"],
)
def test_a_request_the_engine_refuses_is_reported_and_its_neighbours_go_on(asker: Asker, bad: dict[str, Any]) -> None:
    first, second = asker.sample(QUESTIONS[0]), asker.sample(QUESTIONS[1])
    before, refused, after = asker.ask(first, asker.sample(**bad), second)
    assert isinstance(refused, Refused)
    assert refused.message
    assert "\n" not in refused.message
    assert isinstance(before, Finished)
    assert isinstance(after, Finished)
    assert asker.backend.failure is None


def test_values_at_the_edge_of_what_is_allowed_do_not_kill_the_engine(asker: Asker) -> None:
    edges: list[dict[str, Any]] = [
        {"seed": (1 << 63) - 1, "temperature": 1.0},
        {"temperature": 1e-30},
        {"temperature": 2.0, "top_p": 1e-30},
        {"temperature": 1.0, "top_k": 1_000_000},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "repetition_penalty": 10.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "repetition_penalty": 0.01, "seed": 3},
        {"temperature": 1.0, "stop": ["\0", "é" * 256, *map(str, range(14))]},
    ]
    for edge in edges:
        seed = edge.pop("seed", None)
        Sampling(**edge)  # a user may say this
        (answer,) = asker.ask(asker.sample(QUESTIONS[0], max_tokens=4, seed=seed, **edge))
        assert asker.backend.failure is None, edge
        assert isinstance(answer, Finished | Refused)


def test_a_stop_string_ends_the_answer_before_it(asker: Asker) -> None:
    (whole,) = asker.ask(asker.sample(QUESTIONS[0], max_tokens=12))
    word = whole.text.split()[2]
    (cut,) = asker.ask(asker.sample(QUESTIONS[0], max_tokens=12, stop=[word]))
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.receipt.spans[-1].end == len(cut.token_ids)


def test_a_seed_makes_sampling_repeatable_whatever_runs_beside_it(asker: Asker) -> None:
    def hot(seed: int) -> Sample:
        return asker.sample("Write a poem.", max_tokens=24, temperature=1.0, seed=seed)

    (first,) = asker.ask(hot(1))
    again, other, *_ = asker.ask(hot(1), hot(2), asker.sample(QUESTIONS[2]), asker.sample(QUESTIONS[3]))
    assert first.text == again.text != other.text


def test_special_tokens_are_not_in_the_text(asker: Asker) -> None:
    (answer,) = asker.ask(asker.sample(QUESTIONS[0], max_tokens=64))
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_an_engine_that_fails_in_a_step_says_why_and_takes_no_more(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: it costs the engine."""

    def broken(engine: object) -> None:
        raise RuntimeError("CUDA error: illegal memory access")

    monkeypatch.setattr(asker.backend, "_advance", broken)
    asker.start(asker.sample(QUESTIONS[0]))
    assert asker.backend.wait_dead(timeout_s=PATIENCE_S)
    assert asker.backend.failure == "RuntimeError: CUDA error: illegal memory access"
    with pytest.raises(EngineDead, match="illegal memory access"):
        asker.start(asker.sample(QUESTIONS[1]))
