"""The reference backend and the vLLM backend answer alike: greedy, float32, with and without forks and stop strings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_models import MAX_TOKENS, PROMPTS, ask, make_model, sample, samples_of, start_backend
from tiny_models import EOS

from jobs.forking import DECODINGS, forks
from jobs.settings import KVBudget, ModelAlias
from worker.engine import VllmBackend
from worker.forking import load_encoder
from worker.reference import ReferenceBackend

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReferenceBackend, VllmBackend]]:
    model, heads = make_model(tmp_path_factory.mktemp("both"))
    named: Path = model / "generation_config.json"
    named.write_text(f'{{"eos_token_id": [{EOS}, 64]}}')  # another end of threads, which details meet, too
    reference = start_backend(model, heads)
    alias = ModelAlias(path=model, dtype="float32", kv_budget=KVBudget.parse("48 blocks"))
    vllm = VllmBackend(alias, str(model), load_encoder(alias, model)[1])
    vllm.start()
    yield reference, vllm
    reference.shutdown()
    vllm.shutdown()


@pytest.mark.parametrize("decoding", DECODINGS)
def test_tokens_texts_ends_and_trees_are_the_same(
    backends: tuple[ReferenceBackend, VllmBackend], decoding: str
) -> None:
    reference, vllm = backends
    plain = "apar" if forks(decoding) else "ar"
    for one, other in zip(ask(reference, *samples_of(decoding)), ask(vllm, *samples_of(plain)), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert [span[:6] for span in one.receipt.spans] == [span[:6] for span in other.receipt.spans]
        assert one.receipt.stats.forks == other.receipt.stats.forks
        if decoding == "ar":
            assert one.receipt.stats.attended_tokens == other.receipt.stats.attended_tokens
            assert one.receipt.stats.peak_cached_tokens == other.receipt.stats.peak_cached_tokens


@pytest.mark.parametrize("decoding", ["ar", "apar+ptd"])
def test_stop_strings_cut_at_the_same_token(backends: tuple[ReferenceBackend, VllmBackend], decoding: str) -> None:
    reference, vllm = backends
    plain = "apar" if forks(decoding) else "ar"
    num_cut = 0
    for number, whole in enumerate(ask(vllm, *samples_of(plain))):
        stop = whole.text[len(whole.text) // 2 :][:2] or "x"
        (one,) = ask(reference, sample("one", PROMPTS[number], decoding, stop=[stop], max_tokens=MAX_TOKENS))
        (other,) = ask(vllm, sample("other", PROMPTS[number], plain, stop=[stop], max_tokens=MAX_TOKENS))
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        num_cut += len(one.token_ids) < len(whole.token_ids)
    assert num_cut
