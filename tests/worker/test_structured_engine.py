"""Structured output, log probabilities and the prefix cache on the real vLLM engine, with the model that forks."""

import itertools
import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.sampling import Sampling
from jobs.settings import BUNDLED_APAR_MODEL, KVBudget, get_settings
from worker.backend import Decoding, Finished, Refused, Sample
from worker.engine import VllmBackend
from worker.forking import load_encoder
from worker.models import resolve_model
from worker.prompts import PromptEncoder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PATIENCE_S = 600.0
_numbers = itertools.count()
COLOURS = ["red", "green", 'q"uote\\d', "two\nlines"]
LISTS = "Give me five tips for learning to cook."


class Asker:
    def __init__(self, backend: VllmBackend, encoder: PromptEncoder) -> None:
        self.backend = backend
        self._encoder = encoder

    def ask(self, text: str, max_tokens: int = 24, decoding: str = "ar", **values: Any) -> Any:
        return self.ask_all([(text, values)], max_tokens, decoding)[0]

    def ask_all(self, asked: list[tuple[str, dict[str, Any]]], max_tokens: int = 24, decoding: str = "ar") -> list[Any]:
        answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
        samples = [
            Sample(
                f"structured-{next(_numbers)}",
                self._encoder.encode_prompt(text),
                Sampling(**{"temperature": 0.0, **values}),
                max_tokens,
                None,
                Decoding(decoding),
            )
            for text, values in asked
        ]
        self.backend.submit(samples, answers.put)
        found = {answer.key: answer for answer in (answers.get(timeout=PATIENCE_S) for _ in samples)}
        return [found[sample.key] for sample in samples]


@pytest.fixture(scope="module")
def asker(smollm2_path: Path) -> Iterator[Asker]:
    settings = get_settings()
    path = resolve_model(BUNDLED_APAR_MODEL, settings, report=print).path
    alias = settings.model(BUNDLED_APAR_MODEL).model_copy(
        update={"kv_budget": KVBudget.parse("64 blocks"), "dtype": "float32", "engine": {"max_num_seqs": 8}}
    )
    encoder, forking = load_encoder(alias, path)
    backend = VllmBackend(alias, str(path), forking)
    backend.start()
    yield Asker(backend, encoder)
    backend.shutdown()


@pytest.mark.parametrize(
    ("structured", "matches"),
    [
        ({"choice": COLOURS}, lambda text: text in COLOURS),
        ({"choice": ["7"]}, lambda text: text == "7"),
        ({"regex": "[0-9]{3}-[a-c]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-c]{2}", text)),
        (
            {"json_schema": {"type": "object", "properties": {"score": {"type": "integer", "minimum": 1, "maximum": 5}},
                             "required": ["score"], "additionalProperties": False}},
            lambda text: 1 <= json.loads(text)["score"] <= 5,
        ),
    ],
    ids=["choice", "one choice", "regex", "json schema"],
)  # fmt: skip
@pytest.mark.parametrize("decoding", ["ar", "apar"])
def test_an_answer_is_what_its_structure_says_and_does_not_fork(
    asker: Asker, structured: dict[str, Any], matches: Any, decoding: str
) -> None:
    for temperature in (0.0, 1.5):
        answer = asker.ask(LISTS, 48, decoding, structured=structured, temperature=temperature)
        assert isinstance(answer, Finished), answer
        assert answer.finish_reason == "stop"
        assert matches(answer.text), answer.text
        assert answer.receipt.stats.forks == 0


HOSTILE: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "(?=a)b"},
    {"regex": "(a|a)*" * 600},
    {"regex": "(" * 1900 + "a" + ")" * 1900},
    {"json_schema": {"type": "nonsense"}},
    {"json_schema": {"type": "number", "multipleOf": 0.1}},
    {"json_schema": {"type": "array", "minItems": 10**9}},
    {"json_schema": {"allOf": [{"type": "string"}, {"enum": ["a"]}]}},
]


def test_a_grammar_that_cannot_be_compiled_is_its_rows_error_and_its_neighbours_are_answered(asker: Asker) -> None:
    asked = [(LISTS, {"structured": structured}) for structured in HOSTILE]
    first, *refused, last = asker.ask_all([("Say hello.", {}), *asked, ("Say hello.", {})])
    assert isinstance(first, Finished)
    assert isinstance(last, Finished)
    for structured, answer in zip(HOSTILE, refused, strict=True):
        assert isinstance(answer, Refused), str(structured)[:80]
        assert "\n" not in answer.message
        assert answer.message.strip()
    assert asker.backend.failure is None
    assert asker.ask("Say hello.", structured={"choice": ["hello"]}).text == "hello"


def test_grammars_at_the_edge_of_what_is_compiled_leave_the_engine_alive(asker: Asker) -> None:
    edges: list[dict[str, Any]] = [
        {"regex": "(a+)+b"},
        {"regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
        {"regex": "a*"},
        {"json_schema": {}},
        {"json_schema": {"type": "string", "pattern": "(a{1,9999}){1,9999}"}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$ref": "http://example.org/schema"}},
        {"choice": [str(number) for number in range(256)]},
        {"choice": ["\u0001", "é", "漢字"]},
    ]
    answers = asker.ask_all([(LISTS, {"structured": structured}) for structured in edges], max_tokens=8)
    assert all(isinstance(answer, Finished | Refused) for answer in answers)
    assert asker.backend.failure is None
    assert isinstance(asker.ask("Say hello."), Finished)


def test_log_probabilities_are_told_for_every_token_and_those_of_choices_add_up_to_one(asker: Asker) -> None:
    import math

    plain = asker.ask("Say hello.", 6)
    assert plain.logprobs is None
    told = asker.ask("Say hello.", 6, logprobs=3)
    assert (told.text, told.token_ids) == (plain.text, plain.token_ids)
    tokens = json.loads(told.logprobs)
    assert len(tokens) == len(told.token_ids)
    for token in tokens:
        assert token["logprob"] == max(one["logprob"] for one in token["top"]) <= 0
        assert len(token["top"]) == 3
    bare = json.loads(asker.ask("Say hello.", 6, logprobs=0).logprobs)
    assert [token["token"] for token in bare] == [token["token"] for token in tokens]

    digits = asker.ask("Rate this from 1 to 5.", 4, logprobs=20, structured={"choice": list("12345")})
    first = json.loads(digits.logprobs)[0]
    assert first["token"] == digits.text
    assert sorted(one["token"] for one in first["top"]) == list("12345")
    assert sum(math.exp(one["logprob"]) for one in first["top"]) == pytest.approx(1, abs=1e-4)


def test_log_probabilities_of_a_forked_answer_are_in_restored_order(asker: Asker) -> None:
    answer = asker.ask(LISTS, 200, "apar", logprobs=1)
    assert answer.receipt.stats.forks > 0
    told = json.loads(answer.logprobs)
    assert len(told) == len(answer.token_ids)
    text = "".join(token["token"] for token in told if not token["token"].startswith("<|"))
    assert text == answer.text


def test_log_probabilities_end_with_the_answer_at_a_stop_string(asker: Asker) -> None:
    whole = asker.ask(LISTS, 120, "apar")
    word = whole.text.split()[12]
    for decoding in ("ar", "apar"):
        answer = asker.ask(LISTS, 120, decoding, logprobs=2, stop=[word])
        assert isinstance(answer, Finished), answer
        assert len(json.loads(answer.logprobs)) == len(answer.token_ids)
    assert asker.backend.failure is None


def test_a_prompt_that_was_asked_before_comes_from_the_prefix_cache_in_whole_blocks(asker: Asker) -> None:
    prompt = "Please count the words of this line. " * 12
    first, again = asker.ask(prompt, 2), asker.ask(prompt, 2)
    assert first.cached_tokens < again.cached_tokens
    assert again.cached_tokens % asker.backend.facts.block_size == 0
    assert again.text == first.text
