"""A model with its decoders: what the reference backend loads, what it says of itself, how it begins an answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from apar.decoding import Decoder, DecodingError, load_model, make_decoder
from apar.decoding.lade import LadeOptions
from apar.decoding.ptd import PtdOptions
from apar.options import ControlTokens
from jobs.forking import DECODINGS, drafter_of, forks
from jobs.reference_settings import ReferenceSettings
from jobs.settings import ModelAlias
from worker.backend import Sample
from worker.forking import Forking
from worker.planned import planned_facts
from worker.prompts import load_tokenizer
from worker.reference.answer import Answer
from worker.reference.options import sampling_options
from worker.texts import TextStream


class ReferenceEngine:
    """Begins answers of one model; they may use any of its decoders."""

    def __init__(self, alias: ModelAlias, model_path: Path, forking: Forking | None) -> None:
        """Load the model, and the Medusa heads if the alias names some.

        Raises:
            DecodingError: the model, the heads or an option cannot be used.
        """
        self._device = torch.device(_device(alias.reference.device))
        self._model = load_model(model_path, alias.dtype, str(self._device))
        tokenizer = load_tokenizer(model_path)
        self._tokenizer = tokenizer.backend_tokenizer
        self._eos_token_ids = eos_token_ids_of(tokenizer, model_path)
        planned = planned_facts(alias, model_path)
        self.facts = replace(
            planned,
            engine="reference",
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            max_model_len=min(planned.max_model_len, self._model.max_model_len),
            can_fork=forking is not None,
            decodings=decodings_of(alias, forking),
        )
        # All at once: heads that do not fit are found now, not in the middle of a job.
        self._decoders = self._make_decoders(alias.reference, forking)

    def start(self, sample: Sample) -> Answer:
        """Begin a sample's answer; nothing is computed yet.

        Raises:
            DecodingError: the sample says something that cannot be done.
        """
        options = sampling_options(sample)
        decoder = self._decoders.get(sample.decoding.name)
        if decoder is None:
            raise DecodingError(f"decoding is {sample.decoding.name}: use {', '.join(self._decoders)}")
        run = decoder.start(sample.token_ids, max_tokens=sample.max_tokens, sampling=options)
        stream = TextStream(self._tokenizer, sample.token_ids)
        return Answer(sample, run, stream, self._eos_token_ids, sample.sampling.stop or [])

    def recover(self) -> None:
        """After an answer that failed: free its memory, and see whether the device still computes.

        Raises:
            Exception: it does not; the engine cannot be used any more.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        torch.ones(1, device=self._device).sum().item()

    def _make_decoders(self, said: ReferenceSettings, forking: Forking | None) -> dict[str, Decoder]:
        control = None if forking is None else ControlTokens(forking.fork_token_id, forking.child_token_id)
        decoders: dict[str, Decoder] = {}
        for name in self.facts.decodings:
            if not forks(name):
                decoders[name] = make_decoder(
                    name,
                    self._model,
                    control=control,
                    eos_token_ids=self._eos_token_ids,
                    max_model_len=self.facts.max_model_len,
                    ptd=PtdOptions(**said.ptd.model_dump(exclude_none=True)),
                    lade=LadeOptions(**said.lade.model_dump(exclude_none=True)),
                    medusa=said.medusa and said.medusa.expanduser(),
                )
                continue
            assert forking is not None
            # It drafts with what the decoder without forks has, whose heads need not be in memory twice.
            plain = decoders[drafter_of(name) or "ar"]
            decoders[name] = Decoder(
                plain.model,
                plain.drafting,
                control,
                forking.limits,
                plain.eos_token_ids,
                plain.max_model_len,
                forks=True,
            )
        return decoders


def decodings_of(alias: ModelAlias, forking: Forking | None) -> tuple[str, ...]:
    """What the alias's model can be decoded with: forking needs control tokens, Medusa its heads."""
    return tuple(
        name
        for name in DECODINGS
        if (forking is not None or not forks(name))
        and (alias.reference.medusa is not None or drafter_of(name) != "medusa")
    )


def eos_token_ids_of(tokenizer: Any, model_path: Path) -> frozenset[int]:
    """The tokens that end a thread, as vLLM and our scheduler have them: the tokenizer's EOS, and what the model's
    generation config names besides."""
    try:
        config = transformers.GenerationConfig.from_pretrained(model_path)
    except OSError:
        config = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(model_path))
    named = config.to_diff_dict().get("eos_token_id")
    return frozenset({tokenizer.eos_token_id, *([named] if isinstance(named, int) else named or ())} - {None})


def _device(said: str) -> str:
    if said != "auto":
        return said
    return "cuda" if torch.cuda.is_available() else "cpu"
