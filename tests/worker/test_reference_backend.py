"""The reference backend with a tiny real model: answers, statistics, refusals, aborts, and its end."""

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import (
    MAX_TOKENS,
    PATIENCE_S,
    PROMPTS,
    ask,
    make_model,
    oracle,
    sample,
    samples_of,
    start_backend,
)
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, VOCAB_SIZE

from apar.decoding.model import TreeModel
from jobs.errors import Unavailable
from jobs.forking import DECODINGS, forks
from jobs.reference_settings import PtdSettings, ReferenceSettings
from jobs.sampling import Sampling, Structured
from jobs.settings import KVBudget
from worker.backend import EngineDead, Finished, Refused, Sample
from worker.generation import too_long
from worker.prompts import PromptEncoder
from worker.reference import ReferenceBackend
from worker.reference.answer import Answer
from worker.reference.engine import ReferenceEngine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_model(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def backend(folders: tuple[Path, Path]) -> Iterator[ReferenceBackend]:
    backend = start_backend(*folders)
    yield backend
    backend.shutdown()


@pytest.fixture(scope="module")
def encoder(folders: tuple[Path, Path]) -> PromptEncoder:
    return PromptEncoder.load(folders[0], ("[Fork]", "[Child]"))


# --- what it says of itself ---------------------------------------------------------------------------------------


def test_it_says_what_it_holds_and_which_decodings_it_has(backend: ReferenceBackend) -> None:
    facts = backend.facts
    assert (facts.engine, facts.block_size, facts.max_num_seqs) == ("reference", 1, 1)
    assert (facts.num_blocks, facts.max_model_len, facts.context_len) == (MAX_MODEL_LEN,) * 3
    assert f"torch {torch.__version__}" in facts.version
    assert facts.can_fork
    assert facts.decodings == DECODINGS


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [("100 tokens", 100), ("90 blocks", 90), ("8 KiB", 8192 // (2 * 2 * 1 * 32 * 4)), ("8 GiB", MAX_MODEL_LEN)],
)
def test_the_kv_budget_is_one_of_tokens_and_shrinks_the_context(
    folders: tuple[Path, Path], budget: str, tokens: int
) -> None:
    backend = start_backend(folders[0], kv_budget=KVBudget.parse(budget), dtype="auto")
    backend.shutdown()
    assert backend.facts.max_model_len == tokens
    assert backend.facts.num_blocks >= tokens
    if tokens < MAX_MODEL_LEN:
        assert f"the KV budget is {tokens}: raise kv_budget" in (too_long(tokens, backend.facts) or "")


def test_without_control_tokens_and_heads_there_are_fewer_decodings(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain = Path(shutil.copytree(folders[0], tmp_path / "plain"))
    config = json.loads((plain / "config.json").read_text())
    del config["apar"]
    (plain / "config.json").write_text(json.dumps(config))
    backend = start_backend(plain)
    assert (backend.facts.can_fork, backend.facts.decodings) == (False, ("ar", "ptd", "lade"))
    (refused,) = ask(backend, sample("a", PROMPTS[0], "apar+ptd"))
    assert refused.message == "decoding is apar+ptd: use ar, ptd, lade"
    backend.shutdown()


@pytest.mark.parametrize("fault", ["no weights", "no heads", "a drafter's option"])
def test_what_cannot_be_loaded_ends_the_start_with_one_reason(
    folders: tuple[Path, Path], tmp_path: Path, fault: str
) -> None:
    model, said = folders[0], ReferenceSettings(device="cpu")
    if fault == "no weights":
        model = Path(shutil.copytree(model, tmp_path / "broken"))
        (model / "model.safetensors").write_bytes(b"no weights")
        says = "header too large"
    elif fault == "no heads":
        said, says = ReferenceSettings(device="cpu", medusa=tmp_path / "nowhere"), str(tmp_path / "nowhere")
    else:
        said, says = ReferenceSettings(device="cpu", ptd=PtdSettings.model_construct(depth=0)), "depth is 0"
    with pytest.raises(Unavailable, match="the engine cannot start: ") as caught:
        start_backend(model, reference=said)
    assert says in str(caught.value)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoding", DECODINGS)
def test_every_decoding_answers_as_the_oracle_does(
    backend: ReferenceBackend, folders: tuple[Path, Path], encoder: PromptEncoder, decoding: str
) -> None:
    expected = oracle(folders[0], forks(decoding), PROMPTS)
    samples = samples_of(decoding)
    for asked, finished, known in zip(samples, ask(backend, *samples), expected, strict=True):
        assert list(finished.token_ids) == known.token_ids
        assert finished.finish_reason == known.finish_reason
        assert finished.text == encoder.decoder.decode(known.token_ids, skip_special_tokens=True)
        assert {FORK, CHILD}.isdisjoint(finished.token_ids)
        stats, spans = finished.receipt.stats, finished.receipt.spans
        assert [(span.parent, span.kind, span.start, span.end) for span in spans] == [
            (node.parent, node.kind, node.start, node.end) for node in known.nodes
        ]
        prompt, output = len(asked.token_ids), len(finished.token_ids)
        assert stats.threads == stats.forks + 1
        assert (stats.sequential_peak_tokens, stats.steps) == (prompt + output, stats.forwards)
        assert stats.decoding_efficiency == output / stats.forwards
        if decoding == "ar":
            assert (stats.forwards, stats.attended_tokens) == (output, stats.sequential_attended_tokens)
        if decoding in ("ar", "apar"):
            figures = (stats.hit_rate, stats.acceptance_length, stats.draft_nodes, stats.verify_nodes)
            assert figures == (0.0, 1.0, 0, 0)
        elif not forks(decoding):
            hits = stats.hit_rate * stats.forwards
            assert output == pytest.approx(hits * stats.acceptance_length + stats.forwards - hits, abs=1e-9)
    assert decoding in ("ar", "apar") or any(f.receipt.stats.verify_nodes for f in ask(backend, *samples))


@pytest.mark.parametrize("decoding", ["ar", "apar+ptd"])
def test_a_seed_makes_sampling_repeatable_and_another_seed_another_answer(
    backend: ReferenceBackend, decoding: str
) -> None:
    def hot(name: str, seed: int | None) -> Sample:
        return sample(name, PROMPTS[1], decoding, seed, temperature=1.0, top_p=0.95, top_k=50, min_p=0.01)

    first, again, other, unseeded, last = ask(
        backend, hot("a", 1), hot("b", 1), hot("c", 2), hot("d", None), hot("e", (1 << 63) - 1)
    )
    assert first.token_ids == again.token_ids != other.token_ids
    assert all(isinstance(answer, Finished) for answer in (unseeded, last))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.0])
def test_hardly_any_temperature_is_greedy_as_in_vllm(backend: ReferenceBackend, temperature: float) -> None:
    cold, greedy = ask(backend, sample("a", PROMPTS[2], temperature=temperature), sample("b", PROMPTS[2]))
    assert cold.token_ids == greedy.token_ids


def test_an_unsaid_temperature_is_one(backend: ReferenceBackend) -> None:
    def warm(name: str, **values: Any) -> Sample:
        return Sample(name, PROMPTS[1], Sampling(**values), MAX_TOKENS, 5)

    unsaid, one, greedy = ask(backend, warm("a"), warm("b", temperature=1.0), warm("c", temperature=0.0))
    assert unsaid.token_ids == one.token_ids != greedy.token_ids


def test_values_at_the_edge_of_what_is_allowed_are_answered(backend: ReferenceBackend) -> None:
    edges: list[dict[str, Any]] = [
        {"temperature": 2e-5}, {"temperature": 2.0, "top_p": 1e-30}, {"top_k": 1_000_000}, {"top_k": -1},
        {"top_k": 0}, {"min_p": 1.0}, {"stop": ["\0", "é" * 256, *map(str, range(14))]}, {"n": 3},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    ]  # fmt: skip
    for number, edge in enumerate(edges):
        values = {"temperature": 1.0, **edge}
        Sampling(**values)  # a user may say this
        (answer,) = ask(backend, sample(f"edge-{number}", PROMPTS[1], max_tokens=4, **values))
        assert isinstance(answer, Finished), answer


@pytest.mark.parametrize("decoding", ["ar", "apar", "ptd", "apar+ptd"])
def test_a_stop_string_cuts_the_answer_with_its_tree_and_figures(backend: ReferenceBackend, decoding: str) -> None:
    wholes = ask(backend, *samples_of(decoding))
    num_cut = 0
    for number, whole in enumerate(wholes):
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 3] or "x"
        (cut,) = ask(backend, sample(f"cut-{number}", PROMPTS[number], decoding, stop=["never there", stop]))
        assert cut.text == whole.text.partition(stop)[0]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        if stop not in whole.text:
            continue
        num_cut += 1
        stats, spans = cut.receipt.stats, cut.receipt.spans
        assert cut.finish_reason == "stop"
        assert spans[-1].end == len(cut.token_ids)
        assert stats.decoding_efficiency == len(cut.token_ids) / stats.forwards
        assert stats.sequential_peak_tokens == len(PROMPTS[number]) + len(cut.token_ids)
        assert stats.forwards <= whole.receipt.stats.forwards
    assert num_cut >= 2


def test_another_eos_of_the_generation_config_ends_an_answer_and_is_no_text(
    backend: ReferenceBackend, folders: tuple[Path, Path], encoder: PromptEncoder, tmp_path: Path
) -> None:
    whole = max(ask(backend, *samples_of("ar")), key=lambda answer: len(answer.token_ids))
    number = int(whole.key.split("-")[1])
    end = whole.token_ids[len(whole.token_ids) // 2]
    at = whole.token_ids.index(end)
    assert at > 1
    model = Path(shutil.copytree(folders[0], tmp_path / "two-ends"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, EOS]}))
    other = start_backend(model)
    (cut,) = ask(other, sample("cut", PROMPTS[number], "ptd"))
    other.shutdown()
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[: at + 1], "stop")
    assert cut.text == encoder.decoder.decode(list(whole.token_ids[:at]))


# --- refusals, aborts, ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "values", "says"),
    [
        (PROMPTS[0], {"presence_penalty": 0.5}, "presence_penalty is 0.5, which the reference backend cannot do"),
        (PROMPTS[0], {"frequency_penalty": -1.0}, "frequency_penalty is -1.0"),
        (PROMPTS[0], {"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        (PROMPTS[0], {"logprobs": 2}, "logprobs is 2, which the reference backend cannot do"),
        (PROMPTS[0], {"structured": Structured(choice=["a" * 90])}, "structured is {'choice': ['aaa"),
        (PROMPTS[0], {"temperature": 1.0, "top_p": 7.0}, "top_p is 7.0"),
        (PROMPTS[0], {"temperature": float("nan")}, "temperature is nan"),
        ([VOCAB_SIZE + 7], {}, f"token {VOCAB_SIZE + 7}"),
        ([], {}, "0 tokens"),
        ([9] * MAX_MODEL_LEN, {}, f"{MAX_MODEL_LEN} tokens"),
    ],
)
def test_a_bad_row_is_refused_by_name_and_its_neighbours_are_answered(
    backend: ReferenceBackend, token_ids: list[int], values: dict[str, Any], says: str
) -> None:
    before, refused, after = ask(
        backend, sample("a", PROMPTS[1]), sample("bad", token_ids, **values), sample("c", PROMPTS[1])
    )
    assert isinstance(refused, Refused)
    assert says in refused.message
    assert "\n" not in refused.message
    assert before.token_ids == after.token_ids


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("a shape\nis wrong"), "the model failed: RuntimeError: a shape is wrong"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory: lower max_tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: lower max_tokens"),
        (MemoryError(), "out of memory: lower max_tokens"),
    ],
)
def test_a_row_that_the_model_fails_on_is_that_rows_error(
    backend: ReferenceBackend, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    forward = TreeModel.forward

    def fails(self: TreeModel, cache: Any, works: Any) -> Any:
        if list(works[0].pending) == [9, 9, 9]:
            raise error
        return forward(self, cache, works)

    monkeypatch.setattr(TreeModel, "forward", fails)
    before, refused, after = ask(
        backend, sample("a", PROMPTS[1]), sample("bad", [9, 9, 9], "ptd"), sample("c", PROMPTS[1], "ptd")
    )
    assert isinstance(refused, Refused)
    assert refused.message.startswith(says)
    assert before.token_ids == after.token_ids


class Halted:
    """Stops the engine in the middle of an answer: in front of its third forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.num_steps: dict[str, int] = {}
        step = Answer.step

        def halting(answer: Answer) -> Finished | None:
            number = self.num_steps[answer.key] = self.num_steps.get(answer.key, 0) + 1
            if answer.key == "halted" and number == 3:
                self.reached.set()
                assert self.go_on.wait(PATIENCE_S)
            return step(answer)

        monkeypatch.setattr(Answer, "step", halting)


@pytest.fixture(scope="module")
def long_prompt(backend: ReferenceBackend) -> list[int]:
    answers = ask(backend, *samples_of("ar"))
    number = max(range(len(PROMPTS)), key=lambda n: len(answers[n].token_ids))
    assert len(answers[number].token_ids) > 10
    return PROMPTS[number]


def test_an_abort_works_in_the_middle_of_an_answer_and_on_those_that_wait(
    backend: ReferenceBackend, long_prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = Halted(monkeypatch)
    answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    names = ("halted", "waits", "kept")
    backend.submit([sample(name, long_prompt) for name in names], answers.put)
    assert halted.reached.wait(PATIENCE_S)
    backend.abort(["halted", "waits", "a key that nobody knows"])
    halted.go_on.set()
    assert answers.get(timeout=PATIENCE_S).key == "kept"
    assert ask(backend, sample("afterwards", long_prompt))[0].key == "afterwards"
    assert answers.empty()
    assert halted.num_steps["halted"] == 3
    assert "waits" not in halted.num_steps
    assert backend.num_unfinished == 0


def test_a_shutdown_does_not_wait_for_the_answers_end(
    folders: tuple[Path, Path], long_prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = Halted(monkeypatch)
    backend = start_backend(*folders)
    answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    backend.submit([sample("halted", long_prompt)], answers.put)
    assert halted.reached.wait(PATIENCE_S)
    stopping = threading.Thread(target=backend.shutdown)
    stopping.start()
    halted.go_on.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert (answers.empty(), halted.num_steps["halted"]) == (True, 3)
    assert backend.failure is None


def test_an_engine_whose_device_is_gone_says_so_and_takes_no_more(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(engine: ReferenceEngine) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    backend = start_backend(*folders)
    monkeypatch.setattr(ReferenceEngine, "recover", gone)
    answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    backend.submit([sample("a", PROMPTS[0], repetition_penalty=2.0)], answers.put)
    assert backend.wait_dead(timeout_s=PATIENCE_S)
    assert backend.failure == "RuntimeError: CUDA error: device-side assert triggered"
    assert answers.empty()  # the shard goes back to the queue as a whole
    with pytest.raises(EngineDead, match="device-side assert"):
        backend.submit([sample("b", PROMPTS[1])], answers.put)


WITHOUT_VLLM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError("vllm is not here")

sys.meta_path.insert(0, Blocker())
sys.path[:0] = [{tests!r}, {apar!r}]
from pathlib import Path
from reference_models import ask, samples_of, start_backend
import worker.runtime
backend = start_backend(Path({model!r}), Path({heads!r}))
for name in backend.facts.decodings:
    print(name, [len(answer.token_ids) for answer in ask(backend, *samples_of(name))])
backend.shutdown()
assert "vllm" not in sys.modules
"""


def test_every_decoding_runs_where_vllm_cannot_be_imported(
    backend: ReferenceBackend, folders: tuple[Path, Path]
) -> None:
    tests = Path(__file__).parent
    script = WITHOUT_VLLM.format(
        tests=str(tests), apar=str(tests.parent / "apar"), model=str(folders[0]), heads=str(folders[1])
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tests.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = [f"{name} {[len(a.token_ids) for a in ask(backend, *samples_of(name))]}" for name in DECODINGS]
    assert done.stdout.splitlines() == expected
