"""Medusa heads: small networks on a model's last hidden state, each guessing one token further ahead.

Receives a folder (or a base model to begin from); hands on `MedusaHeads`. A folder holds `config.json` and the weights,
as `medusa_lm_head.safetensors` or, in released ones, `medusa_lm_head.pt`; vLLM's own Medusa proposer reads the same
folder. Weights are named `{head}.{layer}.linear.weight`, `{head}.{layer}.linear.bias` and `{head}.{layers}.weight`.

Source: Medusa (Cai et al., 2023), section 2.1; APAR paper, section 3.4.7.

Shape suffixes: n positions, k heads, d hidden, v vocabulary.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from apar import files
from apar.decoding.errors import DecodingError
from apar.decoding.model import TreeModel

WEIGHTS = "medusa_lm_head.safetensors"
RELEASED = "medusa_lm_head.pt"
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_TRAIN = "train heads with `forq train-medusa`"


class ResBlock(nn.Module):  # type: ignore[misc]
    """x + SiLU(Wx + b). It begins as the identity, so that a new head begins as the base's own output layer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_nd: Tensor) -> Tensor:
        return hidden_nd + silu(self.linear(hidden_nd))


class MedusaHeads(nn.ModuleList):  # type: ignore[misc]
    """Head k, from 1, guesses the token k + 1 places behind the one whose hidden state it reads."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__(
            nn.Sequential(
                *(ResBlock(hidden_size) for _ in range(num_layers)), nn.Linear(hidden_size, vocab_size, bias=False)
            )
            for _ in range(num_heads)
        )
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size

    @classmethod
    def beginning(cls, lm_head_vd: Tensor, num_heads: int, num_layers: int) -> "MedusaHeads":
        """Untrained float32 heads, each a copy of the base's output layer."""
        vocab_size, hidden_size = lm_head_vd.shape
        with torch.device("meta"):  # the random start of 28 million weights per head would be thrown away
            heads = cls(num_heads, num_layers, hidden_size, vocab_size)
        heads.to_empty(device=lm_head_vd.device)
        with torch.no_grad():
            for name, parameter in heads.named_parameters():
                if "linear" in name:
                    parameter.zero_()
                else:
                    parameter.copy_(lm_head_vd)
        return heads

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self[0][-1].weight.dtype
        return dtype

    def outputs(self) -> list[Tensor]:
        """Per head, its output layer's weight [v, d]."""
        return [head[-1].weight for head in self]

    def forward(self, hidden_nd: Tensor) -> Tensor:
        """Logits [k, n, v]."""
        return torch.stack([head(hidden_nd) for head in self])


def load_heads(folder: Path, model: TreeModel | None = None) -> MedusaHeads:
    """Read a folder of heads; for a model in its dtype and on its device, else as the file has them, on the CPU.

    Raises:
        DecodingError: no such file, weights that are no Medusa heads, or heads of another model.
    """
    weights = _read(folder)
    num_heads, num_layers = _counts(folder, weights)
    output = weights[f"0.{num_layers}.weight"]
    if output.dim() != 2:
        raise DecodingError(f"{folder}: 0.{num_layers}.weight is {_shape(output)}, where heads have a matrix: {_TRAIN}")
    found_vocab, found_hidden = output.shape
    if model is not None:
        for what, wanted, found in (
            ("hidden size", model.config.hidden_size, found_hidden),
            ("vocabulary", model.vocab_size, found_vocab),
        ):
            if found != wanted:
                raise DecodingError(
                    f"the Medusa heads in {folder} are of another model: their {what} is {found}, this model's "
                    f"{wanted}: {_TRAIN} for this model"
                )
    with torch.device("meta"):
        heads = MedusaHeads(num_heads, num_layers, found_hidden, found_vocab)
    for name, expected in heads.state_dict().items():
        if weights[name].shape != expected.shape:
            raise DecodingError(
                f"{folder}: {name} is {_shape(weights[name])}, where these heads need {_shape(expected)}: {_TRAIN}"
            )
    device, dtype = (output.device, output.dtype) if model is None else (model.device, model.hf.dtype)
    heads.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    heads.requires_grad_(False)
    heads.eval()
    return heads


def save_heads(heads: MedusaHeads, folder: Path, dtype: torch.dtype) -> None:
    """Fill a folder that `load_heads` and vLLM's Medusa proposer read."""
    from safetensors.torch import save_file

    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in heads.state_dict().items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "medusa_fc_bias": True,  # vLLM leaves the biases out without a word unless it is told of them
        "dtype": str(dtype).removeprefix("torch."),
    }
    files.write_json(folder / "config.json", config)


def _read(folder: Path) -> dict[str, Tensor]:
    safe, released = folder / WEIGHTS, folder / RELEASED
    path = safe if safe.is_file() else released
    if not path.is_file():
        raise DecodingError(f"{folder} holds no Medusa heads, neither {WEIGHTS} nor {RELEASED}: {_TRAIN}")
    try:
        if path is safe:
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the readers make of a torn file
        line = " ".join(str(error).split())
        raise DecodingError(f"{path} cannot be read ({line[:200]}): fetch it anew, or {_TRAIN}") from None
    if not isinstance(state, Mapping):
        raise DecodingError(f"{path} holds no weights by name: {_TRAIN}")
    weights: dict[str, Tensor] = {}
    for name, weight in state.items():
        found = _NAME.fullmatch(str(name))
        if found is None or not isinstance(weight, Tensor):
            raise DecodingError(f"{path} has a weight {name!r}, which no Medusa head has: {_TRAIN}")
        weights[".".join(found.groups())] = weight
    return weights


def _counts(folder: Path, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Numbers of heads and of layers: what the weights say, which the config must not contradict."""
    outputs = sorted(tuple(map(int, n.split(".")[:2])) for n in weights if not n.endswith(("linear.weight", ".bias")))
    num_heads = len(outputs)
    num_layers = outputs[0][1] if outputs else 0
    expected = {f"{head}.{num_layers}.weight" for head in range(num_heads)} | {
        f"{head}.{layer}.linear.{part}"
        for head in range(num_heads)
        for layer in range(num_layers)
        for part in ("weight", "bias")
    }
    if not outputs or set(weights) != expected:
        odd = sorted(set(weights) ^ expected)
        raise DecodingError(
            f"the weights in {folder} are not those of whole Medusa heads ({', '.join(odd[:3])}): {_TRAIN}"
        )
    config: Any = files.read_json(folder / "config.json")
    said = config if isinstance(config, dict) else {}
    for what, here in (("heads", num_heads), ("layers", num_layers)):
        # As vLLM does: `num_heads`, `medusa_num_heads`, `num_hidden_layers` and `medusa_num_layers` are all in use.
        for key in said:
            if "num" in key and what in key and said[key] != here:
                raise DecodingError(f"{folder}: config.json says {key} {said[key]}, the weights are of {here}: mend it")
    return num_heads, num_layers


def _shape(weight: Tensor) -> str:
    return " x ".join(map(str, weight.shape))
