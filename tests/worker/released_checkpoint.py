"""A tiny model in a folder laid out like THUDM/apar-7b: a test of all that these checkpoints ask for.

As there: a sentencepiece tokenizer without `tokenizer.json`, 32,000 pieces with byte fallback; [Fork] and [Child] added
behind them as ordinary tokens, 32000 and 32001; EOS 2; no chat template; pickled weights; nothing in `config.json` says
that the model forks. The weights are random, with a taste for a few pieces: words, numbers, line breaks.
"""

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from tiny_models import STANDARD_DEVIATIONS
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import import_protobuf

BOS, EOS, FORK, CHILD = 1, 2, 32000, 32001
FORK_TEXT, CHILD_TEXT = "[SplitMask]", "[SplitSop]"
NUM_PIECES = 32000
MAX_MODEL_LEN = 512
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # sentencepiece's types
_WORDS = "▁the ▁of ▁and ▁to ▁in ▁is ▁it ▁that ▁for ▁on ▁with ▁as ▁at ▁by ▁an ▁be ▁this ▁are ▁from ▁or".split()  # noqa: SIM905
_MARKS = ["1.", "▁1.", "2.", "▁2.", "▁A.", ":", ".", ","]


def make_released_checkpoint(folder: Path, *, seed: int = 3, fork_scale: float = 2.2, end_scale: float = 1.3) -> Path:
    """Write the folder, the same for the same arguments; returns `folder`."""
    folder.mkdir(parents=True)
    pieces = _pieces()
    (folder / "tokenizer.model").write_bytes(_sentencepiece(pieces))
    _write(folder / "added_tokens.json", {CHILD_TEXT: CHILD, FORK_TEXT: FORK})
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(folder / "special_tokens_map.json", {**special, "pad_token": "<unk>"})
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    _write(folder / "tokenizer_config.json", {**special, **settings, "model_max_length": 2048, "pad_token": None})
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=CHILD + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype="float32",
    )
    config.save_pretrained(folder)
    favourites = [pieces.index(text) for text in [*_WORDS, *_MARKS]] + [_newline()]
    torch.save(_weights(config, seed, favourites, fork_scale, end_scale), folder / "pytorch_model.bin")
    return folder


def _weights(
    config: LlamaConfig, seed: int, favourites: list[int], fork_scale: float, end_scale: float
) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                std = next(std for part, std in STANDARD_DEVIATIONS.items() if part in name)
                weight.normal_(0.0, std, generator=generator)
        scales = torch.full((config.vocab_size, 1), 0.05)
        scales[favourites] = 1.0
        scales[FORK], scales[EOS], scales[CHILD] = fork_scale, end_scale, 1.5  # [Child] would be sampled, if it could
        scales[_newline()] = 1.3
        model.lm_head.weight *= scales
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def _newline() -> int:
    return 3 + 0x0A


def _pieces() -> list[str]:
    single = ["▁", *map(chr, range(33, 127))]
    chosen = dict.fromkeys(word[:length] for word in [*_WORDS, *_MARKS] for length in range(2, len(word) + 1))
    filler = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    room = NUM_PIECES - 3 - 256 - len(single)
    while len(chosen) < room:
        chosen.setdefault(next(filler))
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *chosen, *single]


def _sentencepiece(pieces: list[str]) -> bytes:
    model = import_protobuf().ModelProto()
    for number, text in enumerate(pieces):
        kind = _UNKNOWN if number == 0 else _CONTROL if number < 3 else _BYTE if number < 3 + 256 else _NORMAL
        model.pieces.add(piece=text, score=-float(number), type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, BOS, EOS
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    content: bytes = model.SerializeToString()
    return content


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content))
