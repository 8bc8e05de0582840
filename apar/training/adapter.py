"""LoRA on all linear layers and the two control rows: made for training, kept as a folder, merged into its base.

The folder is one of peft's (`adapter_model.safetensors`, `adapter_config.json`) with one file more, `apar.json`, which
names the control tokens. With the base model's folder it is all that `merge` needs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from apar.errors import InputError
from apar.training.vocabulary import Vocabulary, apar_config, fit_embeddings

WEIGHTS, CONFIG, APAR = "adapter_model.safetensors", "adapter_config.json", "apar.json"


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers' own progress bars, about reading and writing weights, off the terminal meanwhile."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def add_lora(model: Any, vocabulary: Vocabulary, rank: int, alpha: int) -> Any:
    """Wrap a model whose embeddings have the control rows already; returns peft's model. What it trains is float32."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    rows = [vocabulary.control.fork, vocabulary.control.child]
    embeddings = {model.get_input_embeddings()}
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        embeddings.add(model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in embeddings]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        trainable_token_indices=dict.fromkeys(names, rows),
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False  # autocast brings both sides to one type, the faster one
    return wrapped


def save(wrapped: Any, vocabulary: Vocabulary, folder: Path, *, base: str, max_depth: int, dtype: torch.dtype) -> None:
    """Fill a folder with the adapter, in `dtype`.

    Args:
        base: what the adapter belongs to, for people to read.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    save_file(
        {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in sorted(state.items())},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config = wrapped.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    listed = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}  # sets have no order of their own
    (folder / CONFIG).write_text(json.dumps(listed, indent=1, sort_keys=True, default=str) + "\n", "utf-8")
    fork_text, child_text = vocabulary.texts
    said = {"fork_token": fork_text, "child_token": child_text, "max_depth": max_depth, "base": base}
    (folder / APAR).write_text(json.dumps(said, indent=1) + "\n", "utf-8")


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Write base and adapter as one ordinary model folder, with the control tokens named in config.json.

    The same two folders give the same bytes, on the CPU, computed in float32, kept in the base's type. `out` appears
    file by file: writing it atomically is the caller's matter.

    Raises:
        InputError: a folder is missing, or the adapter is not one of ours or of another base.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        said = json.loads((adapter / APAR).read_text("utf-8"))
        texts, max_depth = (said["fork_token"], said["child_token"]), int(said["max_depth"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{adapter} is no adapter of `forq train`: it has no {APAR} that can be read") from None
    if not (base / "config.json").is_file():
        raise InputError(f"{base} is no model folder: it has no config.json")
    vocabulary = Vocabulary(base, *texts)
    with no_bars():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        dtype = kept_dtype(base)
        fit_embeddings(model, vocabulary)
        try:
            merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        except (RuntimeError, ValueError, KeyError) as error:
            raise InputError(f"{adapter} does not fit {base}: {str(error).splitlines()[0][:200]}") from None
        write_model(merged, vocabulary, out, max_depth=max_depth, dtype=dtype)


def write_model(model: Any, vocabulary: Vocabulary, out: Path, *, max_depth: int, dtype: torch.dtype) -> None:
    """Fill a folder with an ordinary Hugging Face model: weights, tokenizer, template, `apar` in config.json."""
    model = model.to(dtype)
    model.tie_weights()
    model.config.apar = apar_config(vocabulary, max_depth)
    model.config.use_cache = True
    model.config.dtype = dtype
    model.save_pretrained(out)
    vocabulary.tokenizer.save_pretrained(out)


def kept_dtype(base: Path) -> torch.dtype:
    """The type that the base's weights have on disk, as its config.json says."""
    said = json.loads((base / "config.json").read_text("utf-8"))
    name = said.get("dtype") or said.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
