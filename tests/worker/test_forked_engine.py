"""The real engine on the CPU with a tiny model that forks: answers, trees and statistics as the worker stores them."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CHILD, EOS, FORK, make_tiny_model, random_prompts

from jobs.results import PendingRow, SampleResult
from jobs.sampling import Sampling
from jobs.settings import KVBudget, ModelAlias
from worker.backend import Decoding, Finished, Refused, Sample
from worker.engine import VllmBackend
from worker.forking import load_encoder
from worker.generation import RowInFlight, result_of
from worker.prompts import PromptEncoder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
MAX_TOKENS = 120
PROMPTS = random_prompts(16, seed=11)
AR, APAR = Decoding(), Decoding("apar")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmBackend, PromptEncoder]]:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    alias = ModelAlias(path=path, dtype="float32", kv_budget=KVBudget.parse("48 blocks"), engine={"max_num_seqs": 32})
    encoder, forking = load_encoder(alias, path)
    backend = VllmBackend(alias, str(path), forking)
    backend.start()
    yield backend, encoder
    backend.shutdown()


def ask(backend: VllmBackend, samples: list[Sample]) -> list[Any]:
    answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    backend.submit(samples, answers.put)
    found = {(answer := answers.get(timeout=PATIENCE_S)).key: answer for _ in samples}
    assert backend.failure is None
    return [found[sample.key] for sample in samples]


def samples_of(decoding: Decoding, name: str, **values: Any) -> list[Sample]:
    sampling = Sampling.model_construct(**{"temperature": 0.0, **values})
    return [Sample(f"{name}-{n}", ids, sampling, MAX_TOKENS, None, decoding) for n, ids in enumerate(PROMPTS)]


def stored(sample: Sample, finished: Finished, encoder: PromptEncoder) -> SampleResult:
    """What the shard loop would write."""
    row = PendingRow(1, 0, {}, sample.sampling, 0)
    flight = RowInFlight(row, len(sample.token_ids), [sample], {sample.key: finished})
    (result,) = result_of(flight, encoder).samples
    return result


def check(sample: Sample, finished: Finished, encoder: PromptEncoder) -> SampleResult:
    """What holds of every answer, forked or not, cut or not."""
    result = stored(sample, finished, encoder)
    stats, nodes, prompt, output = result.stats, result.nodes, len(sample.token_ids), len(finished.token_ids)
    assert stats is not None
    assert {FORK, CHILD}.isdisjoint(finished.token_ids)
    assert EOS not in finished.token_ids[:-1]
    assert [node.node for node in nodes] == list(range(len(nodes)))
    assert [node.start for node in nodes] == [0, *(node.end for node in nodes[:-1])]
    assert nodes[-1].end == output == result.output_tokens
    assert "".join(result.text[node.text_start : node.text_end] for node in nodes) == result.text
    assert (stats.sequential_peak_tokens, stats.threads) == (prompt + output, stats.forks + 1)
    assert stats.sequential_attended_tokens == sum(prompt + i for i in range(1, output + 1))
    assert {node.thread for node in nodes} <= set(range(stats.threads))
    assert stats.max_width <= stats.threads
    assert all(0 <= node.first_step <= node.last_step < stats.steps for node in nodes)
    return result


def test_a_forking_models_answers_fork_and_their_trees_cover_them(tiny: tuple[VllmBackend, PromptEncoder]) -> None:
    backend, encoder = tiny
    assert backend.facts.can_fork
    samples = samples_of(APAR, "apar")
    results = [check(s, f, encoder) for s, f in zip(samples, ask(backend, samples), strict=True)]
    forked = [result for result in results if result.stats and result.stats.forks]
    assert len(forked) > len(results) // 4
    assert any(len(result.nodes) > 3 for result in forked)
    assert {node.kind for result in forked for node in result.nodes} == {"root", "detail", "sibling"}
    # Whoever runs beside it: the same answers, one at a time.
    alone = [ask(backend, [sample])[0].token_ids for sample in samples_of(APAR, "alone")[:4]]
    assert alone == [finished.token_ids for finished in ask(backend, samples_of(APAR, "again"))[:4]]


def test_a_job_that_says_ar_never_forks_on_the_same_engine(tiny: tuple[VllmBackend, PromptEncoder]) -> None:
    backend, encoder = tiny
    plain, forking = samples_of(AR, "ar"), samples_of(APAR, "beside")
    answers = ask(backend, [*plain, *forking])
    results = [check(s, f, encoder) for s, f in zip(plain, answers, strict=False)]
    assert all(r.stats and (r.stats.threads, r.stats.forks, len(r.nodes)) == (1, 0, 1) for r in results)
    assert any(finished.receipt.stats.forks for finished in answers[len(plain) :])


def test_stop_strings_cut_forked_answers_with_their_trees(tiny: tuple[VllmBackend, PromptEncoder]) -> None:
    backend, encoder = tiny
    whole = ask(backend, samples_of(APAR, "whole"))
    samples = []
    for number, (sample, finished) in enumerate(zip(samples_of(APAR, "cut"), whole, strict=True)):
        middle = len(finished.text) // 2
        sampling = sample.sampling.model_copy(update={"stop": [finished.text[middle : middle + 3] or "x"]})
        samples.append(Sample(f"cut-{number}", sample.token_ids, sampling, MAX_TOKENS, None, APAR))
    for sample, finished, before in zip(samples, ask(backend, samples), whole, strict=True):
        check(sample, finished, encoder)
        stop = (sample.sampling.stop or [""])[0]
        assert finished.text == before.text.partition(stop)[0]
        assert finished.finish_reason == "stop" or stop not in before.text


def test_jobs_with_shares_of_the_budget_are_all_answered_alike(tiny: tuple[VllmBackend, PromptEncoder]) -> None:
    backend, encoder = tiny
    expected = [finished.token_ids for finished in ask(backend, samples_of(APAR, "free"))]
    small, large = samples_of(Decoding("apar", "a", 0.2), "small"), samples_of(Decoding("apar", "b", 1.0), "large")
    samples = [sample for pair in zip(small, large, strict=True) for sample in pair]
    answers = dict(zip((s.key for s in samples), ask(backend, samples), strict=True))
    for name in ("small", "large"):
        assert [answers[f"{name}-{n}"].token_ids for n in range(len(PROMPTS))] == expected
    for sample in samples:
        check(sample, answers[sample.key], encoder)
