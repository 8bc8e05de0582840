"""The text of an answer on its way: as vLLM would have it, however many tokens come at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_texts import END, PROMPT, TOKENIZER

from apar.decoding.result import DecodingResult, DraftFigures
from apar.tree import Span
from jobs.sampling import Sampling
from worker.backend import Finished, Sample
from worker.reference.answer import Answer
from worker.texts import TextStream

STATS = {
    "threads": 1, "forks": 0, "max_width": 1, "steps": 9, "peak_cached_tokens": 9, "peak_blocks": 9,
    "attended_tokens": 9, "preemptions": 0,
}  # fmt: skip


@dataclass
class Run:
    """Stands in for a `DecodingRun`: brings its tokens in parts."""

    parts: Sequence[Sequence[int]]
    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0

    def step(self) -> bool:
        self.token_ids += self.parts[self.num_steps]
        self.num_steps += 1
        return self.num_steps < len(self.parts)

    def result(self) -> DecodingResult:
        figures = DraftFigures(self.num_steps, self.num_steps, 1, 2, 30, 4)
        nodes = [Span(0, None, "root", 0, 0, len(self.token_ids), 0, 0)]
        ended = self.token_ids[-1:] == [END]
        return DecodingResult(
            list(self.token_ids), "stop" if ended else "length", None, nodes, [], 0, STATS, figures, []
        )


def answer(parts: Sequence[Sequence[int]], stops: Sequence[str]) -> tuple[Finished, Run]:
    run = Run(parts)
    sample = Sample("a", PROMPT, Sampling(), 99, None)
    going: Any = Answer(sample, run, TextStream(TOKENIZER, PROMPT), {END}, stops)  # type: ignore[arg-type]
    while True:
        finished = going.step()
        if finished is not None:
            return finished, run


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def test_a_stop_string_in_the_middle_of_a_step_ends_the_answer_there() -> None:
    finished, run = answer([ids_of("one "), ids_of("two three"), ids_of("never")], ["o t", "three"])
    assert (finished.text, finished.finish_reason) == ("one tw", "stop")
    assert TOKENIZER.decode(list(finished.token_ids)) == "one two t"
    assert run.num_steps == 2
    assert finished.receipt is not None
    assert finished.receipt.spans[-1].end == len(finished.token_ids)
    stats = finished.receipt.stats
    assert (stats.forwards, stats.decoding_efficiency, stats.draft_nodes, stats.verify_nodes) == (2, 4.5, 30, 4)
    assert (stats.hit_rate, stats.acceptance_length) == (0.5, 3.0)


def test_the_last_end_of_sequence_counts_and_is_no_text() -> None:
    finished, _ = answer([ids_of("one"), [END]], ["<end>"])
    assert (finished.text, finished.finish_reason, len(finished.token_ids)) == ("one", "stop", 4)
    cut, _ = answer([ids_of("one")], [])
    assert (cut.text, cut.finish_reason) == ("one", "length")


PIECES = st.sampled_from(["a", "b", "ab", "é", "🍅", " "])


@settings(deadline=None)  # the first example imports vLLM
@given(
    st.one_of(
        st.lists(st.integers(0, 255), max_size=20), st.lists(PIECES, max_size=8).map(lambda p: ids_of("".join(p)))
    ),
    st.lists(st.lists(PIECES, min_size=1, max_size=3).map("".join), max_size=4),
    st.lists(st.integers(1, 6), min_size=30, max_size=30),
    st.booleans(),
)
@example(ids_of("xaby"), ["by", "ab"], [9] * 30, False)
@example(ids_of("xaby"), ["bx", "ab", "xab"], [9] * 30, True)
def test_text_tokens_and_end_are_vllms_whatever_comes_in_one_step(
    ids: list[int], stops: list[str], sizes: list[int], ended: bool
) -> None:
    tokens = [*ids, END] if ended or not ids else ids
    parts, start = [], 0
    for size in sizes:
        if start < len(tokens):
            parts.append(tokens[start : start + size])
            start += size
    finished, _ = answer(parts, stops)
    text, num_tokens, stopped = vllms(tokens, stops)
    assert (finished.text, len(finished.token_ids)) == (text, num_tokens)
    assert finished.finish_reason == ("stop" if stopped or tokens[-1] == END else "length")


def vllms(token_ids: list[int], stops: list[str]) -> tuple[str, int, bool]:
    """Text, number of tokens, and whether a stop string ended it: as vLLM has them, a token at a time."""
    pytest.importorskip("vllm")
    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=PROMPT, mm_features=None, sampling_params=SamplingParams(stop=stops),
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    detokenizer = IncrementalDetokenizer.from_new_request(PreTrainedTokenizerFast(tokenizer_object=TOKENIZER), request)
    for token_id in token_ids:
        if detokenizer.update([token_id], token_id == END) is not None:
            return detokenizer.get_next_output_text(True, False), len(detokenizer.output_token_ids), True
    return detokenizer.get_next_output_text(True, False), len(detokenizer.output_token_ids), False
