"""From a row to samples and back: limits, seeds, statistics, and the text of each node of a forked answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted import receipt
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from jobs.results import Node, PendingRow, RowResult
from jobs.sampling import Sampling
from jobs.settings import KVBudget, ModelAlias
from worker import engine
from worker.backend import Decoding, EngineFacts, Finished, Refused
from worker.engine import engine_args
from worker.generation import RowInFlight, prepare, result_of, too_long
from worker.prompts import PromptError

FACTS = EngineFacts("fake", "1", block_size=4, num_blocks=6, max_model_len=20, context_len=20, max_num_seqs=8)


class Letters:
    """One token a letter; says which way the prompt came in."""

    @property
    def decoder(self) -> Tokenizer:
        letters = {chr(code): code for code in range(256)}
        tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
        tokenizer.decoder = Fuse()
        return tokenizer

    def encode_prompt(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def encode_text(self, text: str) -> list[int]:
        return list(map(ord, text))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise PromptError("template_refused", "roles must alternate")


def row(payload: dict[str, Any] | str = "abc", attempts: int = 0, **sampling: Any) -> PendingRow:
    if isinstance(payload, str):
        payload = {"prompt": payload}
    return PendingRow(7, 3, payload, Sampling(**sampling), attempts)


def prepared(
    pending: PendingRow,
    facts: EngineFacts = FACTS,
    default_max_tokens: int = 5,
    decoding: Decoding = Decoding(),  # noqa: B008
) -> RowInFlight | RowResult:
    return prepare(pending, Letters(), facts, default_max_tokens, "1.1", decoding)  # type: ignore[arg-type]


def result_of_row(flight: RowInFlight) -> RowResult:
    return result_of(flight, Letters())  # type: ignore[arg-type]


def in_flight(pending: PendingRow, **options: Any) -> RowInFlight:
    found = prepared(pending, **options)
    assert isinstance(found, RowInFlight)
    return found


def finished(key: str, num_tokens: int, text: str = "text", nodes: list[list[Any]] | None = None) -> Finished:
    ids = tuple(range(100, 100 + num_tokens))
    return Finished(key, text, "stop", ids, receipt(4, num_tokens, nodes))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_limit() -> None:
    assert too_long(19, FACTS) is None
    message = too_long(20, FACTS)
    assert message == "the prompt has 20 tokens, at most 19 leave room for an answer: shorten it or raise max_model_len"


def test_where_the_kv_budget_is_the_limit_the_message_counts_blocks() -> None:
    small = replace(FACTS, num_blocks=3, max_model_len=12, context_len=20)
    assert too_long(11, small) is None
    # 13 positions with the answer's first token: 4 blocks of 4.
    assert too_long(12, small) == (
        "the prompt and one token of answer need 4 KV blocks of 4 tokens, the KV budget is 3: "
        "raise kv_budget or shorten the prompt"
    )


def test_an_answer_may_grow_to_the_context_and_no_further() -> None:
    assert in_flight(row("abc", max_tokens=100)).samples[0].max_tokens == 16  # 20 less the prompt's 4
    assert in_flight(row("abc", max_tokens=16)).samples[0].max_tokens == 16
    assert in_flight(row("abc", max_tokens=2)).samples[0].max_tokens == 2
    assert in_flight(row("abc")).samples[0].max_tokens == 5
    assert in_flight(row("x" * 18)).samples[0].max_tokens == 1


def test_a_prompt_over_the_limit_ends_as_an_error_row() -> None:
    result = prepared(row("x" * 19))
    assert isinstance(result, RowResult)
    assert (result.request_id, result.error_code, result.samples) == (7, "prompt_too_long", ())


def test_a_conversation_that_the_template_refuses_ends_as_an_error_row() -> None:
    result = prepared(row({"messages": [{"role": "pirate", "content": "arr"}]}))
    assert isinstance(result, RowResult)
    assert (result.error_code, result.error) == ("template_refused", "roles must alternate")


def test_raw_prompts_get_no_chat_template() -> None:
    assert in_flight(row({"prompt": "ab", "raw": True})).samples[0].token_ids == [97, 98]
    assert in_flight(row({"prompt": "ab"})).samples[0].token_ids == [1, 97, 98]


def test_samples_of_a_row_have_seeds_of_their_own_that_are_the_same_in_every_run() -> None:
    first, second = (in_flight(row(n=3, seed=41)).samples for _ in range(2))
    assert [sample.seed for sample in first] == [41, 42, 43]
    assert first == second
    assert len({sample.key for sample in first}) == 3


def test_without_a_seed_samples_have_none() -> None:
    assert [sample.seed for sample in in_flight(row(n=2)).samples] == [None, None]


def test_the_largest_seed_wraps_around_instead_of_overflowing() -> None:
    largest = (1 << 63) - 1
    assert [sample.seed for sample in in_flight(row(n=2, seed=largest)).samples] == [largest, 0]


def test_a_row_is_done_when_every_sample_is_or_one_was_refused() -> None:
    flight = in_flight(row(n=2))
    assert not flight.is_done
    flight.finished[flight.samples[0].key] = finished(flight.samples[0].key, 1)
    assert not flight.is_done
    flight.refused = Refused(flight.samples[1].key, "bad")
    assert flight.is_done
    result = result_of_row(flight)
    assert (result.error_code, result.error, result.samples) == (
        "engine_refused", "the engine refused the row: bad", ()
    )  # fmt: skip


def test_results_keep_the_samples_order_and_carry_a_tree_of_one_node() -> None:
    flight = in_flight(row("abcd", n=2))
    for number in (1, 0):
        key = flight.samples[number].key
        flight.finished[key] = finished(key, 2 + number, f"text {number}")
    result = result_of_row(flight)
    assert [sample.text for sample in result.samples] == ["text 0", "text 1"]
    node = result.samples[1].nodes[0]
    assert (node.node, node.parent, node.kind, node.thread) == (0, None, "root", 0)
    assert (node.start, node.end, node.first_step, node.last_step) == (0, 3, 0, 2)
    assert len(result.samples[1].nodes) == 1


def test_an_empty_answers_node_spans_nothing() -> None:
    flight = in_flight(row())
    key = flight.samples[0].key
    flight.finished[key] = finished(key, 0, "")
    node = result_of_row(flight).samples[0].nodes[0]
    assert (node.start, node.end, node.first_step, node.last_step, node.text_end) == (0, 0, 0, 0, 0)


def test_a_jobs_decoding_goes_with_every_sample() -> None:
    decoding = Decoding("apar", "a job", 0.25)
    assert [sample.decoding for sample in in_flight(row(n=2), decoding=decoding).samples] == [decoding] * 2
    assert in_flight(row()).samples[0].decoding == Decoding("ar", None, 1.0)


def test_a_forked_answer_may_not_outgrow_the_context_either() -> None:
    assert in_flight(row("abc", max_tokens=100), decoding=Decoding("apar")).samples[0].max_tokens == 16


def test_an_answer_without_a_receipt_has_no_statistics_and_no_tree() -> None:
    flight = in_flight(row())
    key = flight.samples[0].key
    flight.finished[key] = Finished(key, "text", "stop", (100, 101), None)
    (sample,) = result_of_row(flight).samples
    assert (sample.text, sample.output_tokens, sample.stats, sample.nodes) == ("text", 2, None, ())


def test_each_node_of_a_forked_answer_has_its_piece_of_the_text() -> None:
    flight = in_flight(row())
    key = flight.samples[0].key
    nodes: list[list[Any]] = [
        [0, None, "root", 0, 0, 2, 0, 1], [1, 0, "detail", 1, 2, 5, 3, 5], [2, 0, "sibling", 0, 5, 5, 3, 3]
    ]  # fmt: skip
    flight.finished[key] = finished(key, 5, "defgh", nodes)  # the letters 100 to 104
    (sample,) = result_of_row(flight).samples
    assert sample.stats is not None
    assert (sample.stats.threads, sample.stats.forks) == (2, 1)
    assert [sample.text[node.text_start : node.text_end] for node in sample.nodes] == ["de", "fgh", ""]
    assert [list(node_fields(node)) for node in sample.nodes] == nodes


def node_fields(node: Node) -> tuple[Any, ...]:
    return (
        node.node, node.parent, node.kind, node.thread, node.start, node.end, node.first_step, node.last_step
    )  # fmt: skip


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(engine, "on_cpu", lambda: request.param)
    return bool(request.param)


def args_for(budget: str | None, **alias: Any) -> dict[str, Any]:
    parsed = KVBudget.parse(budget) if budget else None
    return engine_args(ModelAlias(path=Path("/m"), kv_budget=parsed, **alias), "/m")


def test_without_a_budget_the_engine_takes_what_it_finds(on_cpu: bool) -> None:
    args = args_for(None)
    assert "num_gpu_blocks_override" not in args
    assert args["max_model_len"] == -1
    assert args.get("enforce_eager", False) == on_cpu


@pytest.mark.parametrize("budget", [None, "12 blocks", "384 tokens"])
def test_on_cpu_vllm_is_always_told_bytes_so_that_it_does_not_claim_the_whole_memory(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: True)
    assert 0 < args_for(budget)["kv_cache_memory_bytes"] < psutil.virtual_memory().total
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    assert "kv_cache_memory_bytes" not in args_for(budget)


def test_a_budget_in_bytes_is_passed_on_as_it_is(on_cpu: bool) -> None:
    args = args_for("256 MiB", max_model_len=512)
    assert args["kv_cache_memory_bytes"] == 256 << 20
    assert "num_gpu_blocks_override" not in args


def test_a_budget_in_blocks_adds_the_one_that_vllm_keeps(on_cpu: bool) -> None:
    assert args_for("128 blocks")["num_gpu_blocks_override"] == 129


def test_a_budget_in_tokens_is_rounded_down_to_whole_blocks(on_cpu: bool) -> None:
    assert args_for("4100 tokens")["num_gpu_blocks_override"] == 4100 // (32 if on_cpu else 16) + 1


def test_a_budget_smaller_than_the_context_shrinks_the_context(on_cpu: bool) -> None:
    block_size = 32 if on_cpu else 16
    assert args_for("12 blocks", max_model_len=2048)["max_model_len"] == 12 * block_size
    assert args_for("1200 blocks", max_model_len=2048)["max_model_len"] == 2048


def test_the_aliases_own_engine_options_win(on_cpu: bool) -> None:
    args = args_for("128 blocks", engine={"enforce_eager": False, "block_size": 64, "max_num_seqs": 5}, dtype="float32")
    assert (args["enforce_eager"], args["block_size"], args["max_num_seqs"]) == (False, 64, 5)
    assert args["dtype"] == "float32"
    assert args_for("6400 tokens", engine={"block_size": 64})["num_gpu_blocks_override"] == 101
