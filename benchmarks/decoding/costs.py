"""What a forward costs by the number of nodes in it: the part of a decoder's speed that the machine decides."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from apar.decoding.drafting import NO_PARENT, Draft
from apar.decoding.errors import DecodingError
from apar.decoding.model import TreeModel, Work

CONTEXT_TOKENS = 512
NUM_FORWARDS = 12
NUM_WARM = 3

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "vicuna-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32002,
        "tie_word_embeddings": False,
    },
    "vicuna-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32002,
        "tie_word_embeddings": False,
    },
}
"""Llamas of known sizes: the demo's model and the two of the APAR paper."""


def random_model(shape: str, dtype: str, device: str) -> TreeModel:
    """A model of this shape with random weights, made on the device.

    Raises:
        DecodingError: no such shape or configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        said = SHAPES[shape] if shape in SHAPES else json.loads(Path(shape).read_text("utf-8"))
        said = {"model_type": "llama", "max_position_embeddings": 4096, **said}
        config = AutoConfig.for_model(**said)
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DecodingError(
            f"shape is {shape!r}: use {', '.join(SHAPES)}, or a model's config.json ({error})"
        ) from error
    return TreeModel(hf)


def measure(model: TreeModel, node_counts: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds per forward of one new token and so many drafted nodes behind a context; the counts take turns."""
    cache = model.new_cache()
    context = [7 + i % 100 for i in range(CONTEXT_TOKENS)]
    slots = model.forward(cache, [Work([], context, Draft())])[0].slots
    times: dict[int, list[float]] = {count: [] for count in node_counts}
    for turn in range(NUM_WARM + NUM_FORWARDS):
        for count in node_counts:
            chain = Draft(list(range(7, 7 + count)), [NO_PARENT, *range(count - 1)][:count])
            started = time.perf_counter()
            computed = model.forward(cache, [Work(slots, [7], chain)])[0]
            computed.logits_nv.argmax(dim=-1).tolist()  # waits for the device, as decoding does
            if turn >= NUM_WARM:
                times[count].append(time.perf_counter() - started)
            cache.pool.release(computed.slots)
    plain = statistics.median(times[node_counts[0]])
    return [
        {
            "nodes": count,
            "ms_per_forward": round(1000 * statistics.median(times[count]), 3),
            "relative": round(statistics.median(times[count]) / plain, 3),
        }
        for count in node_counts
    ]
