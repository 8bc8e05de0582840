"""An alias of a base and an adapter: merged once, cached, rebuilt when either changes, and refused in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tiny_models import FORK, make_tiny_model

from jobs.errors import BadInput, Unavailable
from jobs.forking import check_decoding
from jobs.settings import BUNDLED_APAR_MODEL, DEFAULT_MODEL, ModelAlias, Settings
from worker import models
from worker.adapter_model import FILES, adapter_digest, adapter_folder
from worker.forking import load_encoder
from worker.model_cache import MANIFEST
from worker.models import resolve_model


@pytest.fixture
def lines() -> list[str]:
    return []


def write_base(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def write_adapter(folder: Path, weights: bytes = b"rows") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "apar.json").write_text(json.dumps({"fork_token": "<|fork|>", "child_token": "<|child|>"}))
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
def settings(tmp_path: Path, base: Path, adapter: Path) -> Settings:
    return with_adapter(tmp_path, base, str(adapter))


def with_adapter(tmp_path: Path, base: Path, adapter: str) -> Settings:
    return Settings(
        home=tmp_path / "home",
        models={"whole": ModelAlias(path=base), "forking": ModelAlias(base="whole", adapter=adapter)},
    )


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    """Replace the merge by one that writes a folder at once, and list its calls."""
    calls: list[tuple[Path, Path]] = []

    def merge(base: Path, adapter: Path, target: Path) -> None:
        calls.append((base, adapter))
        target.mkdir()
        (target / "config.json").write_text('{"apar": {"fork_token_id": 1, "child_token_id": 2}}')
        weights = (base / "model.safetensors").read_bytes() + (adapter / "adapter_model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(weights)

    monkeypatch.setattr(models, "merge", merge)
    return calls


Merges = list[tuple[Path, Path]]


def test_it_is_merged_into_its_base_once(
    settings: Settings, base: Path, adapter: Path, lines: list[str], merges: Merges
) -> None:
    found = [resolve_model("forking", settings, report=lines.append) for _ in range(2)]
    assert [files.source for files in found] == ["adapter", "cache"]
    assert found[0].path == found[1].path == settings.home / "models" / "forking"
    assert (found[0].path / "model.safetensors").read_bytes() == b"weightsrows"
    assert merges == [(base, adapter)]
    assert lines == ["model forking: merging its adapter into whole, once"]
    manifest = json.loads((found[0].path / MANIFEST).read_text())
    assert manifest["source"].startswith(f"path:{base}#")
    assert manifest["source"].endswith(f" + adapter:{adapter_digest(adapter)}")
    assert [entry.name for entry in found[0].path.parent.iterdir() if entry.is_dir()] == ["forking"]


def test_a_full_disk_is_one_line_and_no_half_model(
    tmp_path: Path, base: Path, adapter: Path, merges: Merges, small_disk: Any
) -> None:
    disk = small_disk(4 << 20)
    settings = with_adapter(disk.folder, base, str(adapter))
    write_base(base, bytes(2 << 20))
    disk.fill(but=1 << 20)
    with pytest.raises(Unavailable, match="No space left on device") as caught:
        resolve_model("forking", settings, report=print)
    assert "\n" not in str(caught.value)
    assert [name for name in disk.names() if "lock" not in name] == ["home", "home/models"]
    disk.free()
    found = resolve_model("forking", settings, report=print)
    assert (found.path / "model.safetensors").stat().st_size == (2 << 20) + len(b"rows")


@pytest.mark.parametrize("file", FILES)
def test_another_adapter_is_another_model(
    settings: Settings, adapter: Path, lines: list[str], merges: Merges, file: str
) -> None:
    resolve_model("forking", settings, report=print)
    (adapter / file).write_text('{"other": 1}')
    assert resolve_model("forking", settings, report=lines.append).source == "adapter"
    assert "the configuration does not ask for" in lines[0]
    assert len(merges) == 2


def test_another_base_is_another_model(settings: Settings, base: Path, lines: list[str], merges: Merges) -> None:
    resolve_model("forking", settings, report=print)
    write_base(base, b"weights of another training")
    found = resolve_model("forking", settings, report=lines.append)
    assert (found.source, len(merges)) == ("adapter", 2)
    assert (found.path / "model.safetensors").read_bytes() == b"weights of another trainingrows"


def test_a_damaged_merge_is_told_and_made_again(settings: Settings, lines: list[str], merges: Merges) -> None:
    weights = resolve_model("forking", settings, report=print).path / "model.safetensors"
    weights.write_bytes(b"weightzrows")
    assert resolve_model("forking", settings, report=lines.append).source == "adapter"
    assert "checksum of model.safetensors does not match" in lines[0]
    assert weights.read_bytes() == b"weightsrows"


def test_the_base_is_not_needed_once_merged(
    tmp_path: Path, adapter: Path, merges: Merges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converted or downloaded base may be gone, and no hub is asked."""
    package = tmp_path / "packages" / "a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "m.gguf").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(models, "convert", lambda file, target: write_base(target))
    whole = ModelAlias(packaged_gguf="a_package:m.gguf")
    aliases = {"whole": whole, "forking": ModelAlias(base="whole", adapter=str(adapter))}
    settings = Settings(home=tmp_path / "home", models=aliases)
    found = resolve_model("forking", settings, report=print)
    assert json.loads((found.path / MANIFEST).read_text())["source"].startswith("gguf:a_package:m.gguf#1 + adapter:")
    shutil.rmtree(package)
    shutil.rmtree(settings.home / "models" / "whole")
    assert resolve_model("forking", settings, report=print).source == "cache"
    assert len(merges) == 1


def test_an_adapter_inside_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, base: Path, merges: Merges, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "broken_package"
    adapter = write_adapter(package / "bundled" / "mine")
    (package / "__init__.py").write_text("raise ImportError('needs what is not installed')")
    monkeypatch.syspath_prepend(str(package.parent))
    settings = with_adapter(tmp_path, base, "broken_package:bundled/mine")
    assert resolve_model("forking", settings, report=print).source == "adapter"
    assert merges == [(base, adapter)]
    assert adapter_folder("broken_package.bundled:mine") == adapter
    assert "broken_package" not in sys.modules


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("worker:bundled/none-such", "adapter worker:bundled/none-such: the installed package does not contain it"),
        ("no_such_package:a", "adapter no_such_package:a: the installed package does not contain it"),
        ("/no/such/folder", "adapter /no/such/folder: no such folder"),
        ("{base}", r"adapter \S*/base: \S*/base has no apar.json"),
    ],
)
def test_an_adapter_that_is_not_there_is_one_clear_line(
    tmp_path: Path, base: Path, merges: Merges, adapter: str, says: str
) -> None:
    with pytest.raises(Unavailable, match=says) as caught:
        resolve_model("forking", with_adapter(tmp_path, base, adapter.format(base=base)), report=print)
    assert "\n" not in str(caught.value)
    assert "mend `adapter` of [models.forking], or use the alias 'whole' without it" in str(caught.value)
    assert merges == []


def test_a_base_that_is_nowhere_says_so_and_leaves_nothing_behind(settings: Settings, base: Path) -> None:
    shutil.rmtree(base)
    with pytest.raises(Unavailable, match="model 'forking' needs its base: model 'whole' is not available") as caught:
        resolve_model("forking", settings, report=print)
    assert "\n" not in str(caught.value)
    assert [path for path in (settings.home / "models").iterdir() if path.is_dir()] == []


def test_a_merge_that_fails_says_so_and_leaves_nothing_behind(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(base: Path, adapter: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").touch()
        raise RuntimeError("size mismatch\nfor embed_tokens")

    monkeypatch.setattr(models, "merge", fail)
    with pytest.raises(Unavailable, match="into whole: RuntimeError: size mismatch for embed_tokens") as caught:
        resolve_model("forking", settings, report=print)
    assert "\n" not in str(caught.value)
    assert [path for path in (settings.home / "models").iterdir() if path.is_dir()] == []


def test_two_processes_merge_once(tmp_path: Path, base: Path, adapter: Path) -> None:
    script = f"""
import time
from pathlib import Path
from jobs.settings import ModelAlias, Settings
from worker import models

def merge(base, adapter, target):
    time.sleep(0.5)
    target.mkdir()
    (target / "config.json").write_text("{{}}")
    (target / "model.safetensors").write_bytes(b"weights")

models.merge = merge
whole, forking = ModelAlias(path=Path({str(base)!r})), ModelAlias(base="whole", adapter={str(adapter)!r})
settings = Settings(home=Path({str(tmp_path / "home")!r}), models={{"whole": whole, "forking": forking}})
print(models.resolve_model("forking", settings, report=lambda line: None).source)
"""
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(process.communicate(timeout=60)[0].strip() for process in running) == ["adapter", "cache", "cache"]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"base": "whole"}, "base and adapter go together"),
        ({"adapter": "a:b"}, "base and adapter go together"),
        ({"base": "whole", "adapter": "a:b", "path": "/m"}, "path stands beside adapter"),
        ({"base": "whole", "adapter": "a:b", "packaged_gguf": "a:m.gguf"}, "packaged_gguf stands beside adapter"),
        ({"base": "gone", "adapter": "a:b"}, "its base 'gone' is not an alias"),
        ({"base": "other", "adapter": "a:b"}, "its base 'other' has a base itself"),
        ({"base": "forking", "adapter": "a:b"}, "its base 'forking' has a base itself"),
    ],
)
def test_an_alias_that_cannot_be_meant_is_refused(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    aliases = {"whole": {"path": "/m"}, "other": {"base": "whole", "adapter": "a:b"}, "forking": said}
    with pytest.raises(ValidationError, match=says):
        Settings(home=tmp_path, models=aliases)  # type: ignore[arg-type]


def test_a_job_for_it_may_fork_before_anything_is_merged_or_here(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "nothing")
    check_decoding(settings, BUNDLED_APAR_MODEL, "apar")
    check_decoding(settings, BUNDLED_APAR_MODEL, "ar")
    with pytest.raises(BadInput, match="not known to fork"):
        check_decoding(settings, DEFAULT_MODEL, "apar")


def test_the_bundled_alias_has_its_bases_budget(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    plain, forking = settings.model(DEFAULT_MODEL), settings.model(BUNDLED_APAR_MODEL)
    assert forking.base == DEFAULT_MODEL
    for name in ("kv_budget", "max_model_len", "default_max_tokens", "dtype"):
        assert getattr(forking, name) == getattr(plain, name)


def test_the_command_takes_several_aliases_and_stops_at_one_that_cannot_be_had(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_adapter(tmp_path, base, "worker:bundled/none-such")
    monkeypatch.setattr(models, "get_settings", lambda: settings)
    assert models.main(["whole", "forking"]) == Unavailable.exit_code
    printed = capsys.readouterr()
    assert (printed.out.count("\n"), printed.err.count("\n")) == (1, 1)
    assert "model whole is ready (path)" in printed.out


# --- with a real adapter ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny base that knows nothing of forks, and an adapter of it as training writes them, its weights random."""
    pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    from apar.training.adapter import add_lora, save
    from apar.training.vocabulary import Vocabulary, fit_embeddings

    folder = tmp_path_factory.mktemp("trained")
    base = make_tiny_model(folder / "base")
    config = json.loads((base / "config.json").read_text())
    del config["apar"]
    (base / "config.json").write_text(json.dumps(config))
    vocabulary = Vocabulary(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    fit_embeddings(model, vocabulary)
    torch.manual_seed(1)
    wrapped = add_lora(model, vocabulary, 4, 8)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0.0, 0.02)
    (folder / "adapter").mkdir()
    save(wrapped, vocabulary, folder / "adapter", base="tiny", max_depth=1, dtype=torch.bfloat16)
    return base, folder / "adapter"


def test_a_real_adapter_becomes_a_model_that_forks(
    trained: tuple[Path, Path], tmp_path: Path, lines: list[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    base, adapter = trained
    settings = with_adapter(tmp_path, base, str(adapter))
    found = resolve_model("forking", settings, report=lines.append)
    assert (found.source, len(lines)) == ("adapter", 1)
    encoder, forking = load_encoder(settings.model("forking"), found.path)
    assert forking is not None
    assert (forking.fork_token, forking.child_token, forking.limits.max_depth) == ("<|fork|>", "<|child|>", 1)
    assert forking.fork_token_id > FORK
    assert {forking.fork_token_id, forking.child_token_id}.isdisjoint(encoder.encode_prompt("a <|fork|> b"))
    whole, merged = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (base, found.path))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert whole[name].dtype == merged[name].dtype
    assert not torch.equal(whole[name], merged[name])
    # The same bytes again: workers on two machines have the same model.
    again = with_adapter(tmp_path / "again", base, str(adapter))
    manifests = [
        json.loads((resolve_model("forking", s, report=print).path / MANIFEST).read_text()) for s in (settings, again)
    ]
    assert manifests[0] == manifests[1]


def test_the_bundled_adapter_makes_the_bundled_model_fork(smollm2_path: Path, lines: list[str]) -> None:
    """Merged in FORQ_HOME, as set-up does."""
    from jobs.settings import get_settings

    settings = get_settings()
    name = settings.model(BUNDLED_APAR_MODEL).adapter
    assert name is not None
    adapter = adapter_folder(name)
    assert sum(file.stat().st_size for file in adapter.iterdir()) <= 40 << 20
    found = resolve_model(BUNDLED_APAR_MODEL, settings, report=lines.append)
    _, forking = load_encoder(settings.model(BUNDLED_APAR_MODEL), found.path)
    assert forking is not None
