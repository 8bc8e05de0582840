"""The limits an engine will have, worked out from the alias and the model's configuration; the reference backend takes
its own from here."""

from pathlib import Path
from typing import Any

from jobs.settings import ModelAlias
from worker.backend import EngineFacts
from worker.engine import block_size_of, num_blocks_of


def planned_facts(alias: ModelAlias, model_path: Path) -> EngineFacts:
    """The limits an engine for this alias would report, worked out from the model's own configuration.

    Bytes become blocks by the plain attention layout, keys and values of every layer; models that cache less (sliding
    windows, latent attention) fit more than this says.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    context = config.max_position_embeddings
    block_size = block_size_of(alias)
    limit = min(context, alias.max_model_len or context)
    num_blocks = num_blocks_of(alias)
    if alias.kv_budget is not None and num_blocks is None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        block_bytes = 2 * config.num_hidden_layers * heads * head_dim * _value_bytes(alias, config) * block_size
        num_blocks = alias.kv_budget.amount // block_bytes
        if alias.backend == "vllm":
            num_blocks -= 1  # the null block
    if num_blocks is None:
        num_blocks = -(-limit // block_size)
    return EngineFacts("planned", "", block_size, num_blocks, min(limit, num_blocks * block_size), context, 1)


def _value_bytes(alias: ModelAlias, config: Any) -> int:
    # vLLM's `auto` makes float32 models half as wide; the reference backend takes them as they are.
    is_wide = alias.backend == "reference" and str(config.dtype).endswith("float32")
    return 4 if alias.dtype == "float32" or (alias.dtype == "auto" and is_wide) else 2
