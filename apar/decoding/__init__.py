"""Decoders at batch 1 on any causal language model of transformers: no vLLM, one prompt at a time."""

from apar.decoding.decoder import Decoder, DecodingRun
from apar.decoding.errors import DecodingError
from apar.decoding.model import TreeModel, load_model
from apar.decoding.registry import DECODERS, make_decoder
from apar.decoding.result import DecodingResult, DraftFigures, ThreadPath, ThreadStep
from apar.decoding.sampling import SamplingOptions

__all__ = [
    "DECODERS",
    "Decoder",
    "DecodingError",
    "DecodingResult",
    "DecodingRun",
    "DraftFigures",
    "SamplingOptions",
    "ThreadPath",
    "ThreadStep",
    "TreeModel",
    "load_model",
    "make_decoder",
]
