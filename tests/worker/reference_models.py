"""A tiny forking model with Medusa heads behind the reference backend, and samples for it."""

import queue
from pathlib import Path
from typing import Any

import torch
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN, make_tiny_model, random_prompts
from transformers import AutoModelForCausalLM

from apar.decoding.medusa_heads import MedusaHeads, save_heads
from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder, ReferenceResult
from jobs.reference_settings import ReferenceSettings
from jobs.sampling import Sampling
from jobs.settings import ModelAlias
from worker.backend import Decoding, Finished, Refused, Sample
from worker.engine_thread import EngineThread
from worker.forking import load_encoder
from worker.reference import ReferenceBackend

PATIENCE_S = 120.0
MAX_TOKENS = 60
PROMPTS = random_prompts(6, seed=11)


def make_model(folder: Path) -> tuple[Path, Path]:
    """A model folder and one of heads for it, which guess badly but not always."""
    model = make_tiny_model(folder / "model")
    lm_head = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_output_embeddings().weight
    (folder / "heads").mkdir()
    save_heads(MedusaHeads.beginning(lm_head, num_heads=2, num_layers=1), folder / "heads", torch.float32)
    return model, folder / "heads"


def start_backend(model: Path, heads: Path | None = None, **values: Any) -> ReferenceBackend:
    values.setdefault("reference", ReferenceSettings(device="cpu", medusa=heads))
    alias = ModelAlias(path=model, backend="reference", **{"dtype": "float32", **values})
    backend = ReferenceBackend(alias, str(model), load_encoder(alias, model)[1])
    backend.start()
    return backend


def sample(key: str, token_ids: list[int], decoding: str = "ar", seed: int | None = None, **values: Any) -> Sample:
    max_tokens = values.pop("max_tokens", MAX_TOKENS)
    sampling = Sampling.model_construct(**{"temperature": 0.0, **values})
    return Sample(key, token_ids, sampling, max_tokens, seed, Decoding(decoding))


def samples_of(decoding: str, **values: Any) -> list[Sample]:
    return [sample(f"{decoding}-{number}", ids, decoding, **values) for number, ids in enumerate(PROMPTS)]


def ask(backend: EngineThread[Any], *samples: Sample) -> list[Any]:
    answers: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    backend.submit(samples, answers.put)
    found = {(answer := answers.get(timeout=PATIENCE_S)).key: answer for _ in samples}
    assert backend.failure is None
    assert answers.empty()
    return [found[sample.key] for sample in samples]


def oracle(model: Path, forks: bool, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[ReferenceResult]:
    """What `apar.reference` answers, thread by thread, with no drafting."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    decoder = ReferenceDecoder(hf, ControlTokens(FORK, CHILD), ForkLimits(), [EOS], MAX_MODEL_LEN)
    return [decoder.decode(ids, max_tokens=max_tokens, fork=forks) for ids in prompts]
