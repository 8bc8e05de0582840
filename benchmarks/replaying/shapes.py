"""Writes model folders that hold a `config.json` and no weights: vLLM fills them in with `load_format="dummy"`.

Tokens are forced, so that only a model's shape matters: what a step costs.
"""

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Almost free: for runs that ask what the scheduler does, not how long it takes. Tokens are folded into 2,048.
    "ghost": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2048},
    # 10M parameters, most of them the vocabulary: light on two CPU cores.
    "light": {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3},
    # As the bundled model.
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # 13B as the paper's larger model: for a GPU.
    "vicuna-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}


def model_config(shape: str, eos: int) -> dict[str, Any]:
    """The Llama configuration of a shape by name, or the one in the file of that name."""
    if shape not in SHAPES:
        loaded: dict[str, Any] = json.loads(Path(shape).read_text())
        return loaded
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": eos,
        **SHAPES[shape],
    }
    config.setdefault("intermediate_size", 4 * config["hidden_size"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return config


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """The folder, with the configuration in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
