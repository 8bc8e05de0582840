"""Turns a model alias into a local folder that vLLM loads.

Receives an alias and the settings; hands on a `ModelFiles`. Sources, in this order: the configured `path`, the cache
under `FORQ_HOME/models/<alias>`, the Hugging Face hub, a GGUF file inside an installed Python package. What the last
two bring is written beside the cache, checked, synced and renamed into place under a file lock, so that a crash leaves
no half model and two processes fetch once.

    python -m worker.models [ALIAS]     fetch or convert now, as set-up does
"""

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from jobs.errors import ForqError, Unavailable
from jobs.settings import ModelAlias, Settings, get_settings
from worker.gguf_model import convert, packaged_file

MANIFEST = "forq-manifest.json"
CONVERTER_VERSION = 1
"""Raised whenever the conversion's output changes, so that older caches are rebuilt."""
_HASH_LIMIT_BYTES = 2 << 30
"""Larger models are checked by size alone: hashing them would cost seconds at every start."""
_HUB_TIMEOUT_S = 2.0
_HUB_DEADLINE_S = 5.0
"""For the whole first contact: name resolution and the client's own retries escape `_HUB_TIMEOUT_S`."""
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
"""No pickles: loading one runs whatever code it holds."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class ModelFiles:
    """A model folder in the Hugging Face layout, ready to load, and where this call found it."""

    alias: str
    path: Path
    source: Literal["path", "cache", "hub", "gguf"]


def resolve_model(alias: str, settings: Settings, *, report: Report) -> ModelFiles:
    """Find the alias's model on this machine; fetch or convert it once if need be.

    `report` gets one line per thing worth telling: a download, a conversion, a damaged cache.

    Raises:
        BadInput: if the alias is not configured.
        Unavailable: if no source has the model; names what was tried and the remedy.
    """
    spec = settings.model(alias)
    tried: list[str] = []
    if spec.path is not None:
        path = spec.path.expanduser().absolute()
        fault = _folder_fault(path)
        if fault is None:
            return ModelFiles(alias, path, "path")
        tried.append(f"path {path}: {fault}")
        report(f"model {alias}: configured path {path} cannot be used: {fault}")
    if spec.hub_id is None and spec.packaged_gguf is None:
        raise _unavailable(alias, tried)
    cache = settings.home / "models" / alias
    if _cache_fault(cache, spec) is None:
        return ModelFiles(alias, cache, "cache")
    try:
        with _locked(cache, report):
            return _fill_cache(alias, spec, cache, tried, report)
    except OSError as error:
        tried.append(f"cache {cache}: {_one_line(error)}")
        raise _unavailable(alias, tried) from error


def _fill_cache(alias: str, spec: ModelAlias, cache: Path, tried: list[str], report: Report) -> ModelFiles:
    # Checked again under the lock: another process may have finished, or a rename may have been under way before.
    fault = _cache_fault(cache, spec)
    if fault is None:
        return ModelFiles(alias, cache, "cache")
    if cache.exists():
        report(f"model {alias}: the cache {cache} cannot be used ({fault}); rebuilding it")
    for leftover in cache.parent.glob(f".{alias}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    new = cache.parent / f".{alias}.new-{os.getpid()}"
    try:
        if spec.hub_id is not None:
            try:
                # A complete snapshot in the user's Hugging Face cache is content-addressed: it needs no copy of ours.
                snapshot = _hugging_face_cache(spec.hub_id, spec.revision)
                if snapshot is not None:
                    return ModelFiles(alias, snapshot, "hub")
                _download(spec.hub_id, spec.revision, new, lambda: report(f"model {alias}: downloading {spec.hub_id}"))
                _install(new, cache, alias, _hub_source(spec))
                return ModelFiles(alias, cache, "hub")
            except Exception as error:  # the client raises its own, httpx's, OSError and ValueError: all mean "next"
                tried.append(f"hub {spec.hub_id}: {_one_line(error)}")
        if spec.packaged_gguf is not None:
            try:
                gguf_file = packaged_file(spec.packaged_gguf)
                report(f"model {alias}: converting {gguf_file.name}, once, in about half a minute")
                convert(gguf_file, new)
                _install(new, cache, alias, _gguf_source(spec))
                return ModelFiles(alias, cache, "gguf")
            except Exception as error:  # as above, and whatever transformers makes of an odd file
                tried.append(f"package {spec.packaged_gguf}: {_one_line(error)}")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    raise _unavailable(alias, tried)


def _unavailable(alias: str, tried: list[str]) -> Unavailable:
    what = "; ".join(tried) or "it names no path, hub_id or packaged_gguf"
    remedy = f"set `path` of [models.{alias}] to a Hugging Face model folder"
    return Unavailable(f"model {alias!r} is not available. Tried {what}. Remedy: {remedy}, or mend a source above")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _hub_source(spec: ModelAlias) -> str:
    return f"hub:{spec.hub_id}@{spec.revision or 'main'}"


def _gguf_source(spec: ModelAlias) -> str:
    return f"gguf:{spec.packaged_gguf}#{CONVERTER_VERSION}"


# --- the cache ---


@contextmanager
def _locked(cache: Path, report: Report) -> Iterator[None]:
    cache.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache.parent / f".{cache.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"model {cache.name}: another process is fetching it; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _folder_fault(folder: Path) -> str | None:
    """Say why vLLM could not load this folder, or None."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return f"{index.name} cannot be read"
        missing = sorted(name for name in shards if not (folder / name).is_file())
        return f"{len(missing)} weight files are missing, {missing[0]} first" if missing else None
    return None if any(folder.glob("*.safetensors")) else "it has no .safetensors weights"


def _cache_fault(cache: Path, spec: ModelAlias) -> str | None:
    """Say why the cache does not hold this model whole, or None."""
    try:
        manifest = json.loads((cache / MANIFEST).read_text("utf-8"))
        source, files = (
            manifest["source"],
            {str(k): (int(v["size"]), v["sha256"]) for k, v in manifest["files"].items()},
        )
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"
    if source not in (_hub_source(spec), _gguf_source(spec)):
        return f"it holds {source}, which the configuration does not ask for"
    for name, (size, _) in files.items():
        path = cache / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if sum(size for size, _ in files.values()) < _HASH_LIMIT_BYTES:
        for name, (_, digest) in files.items():
            if _sha256(cache / name) != digest:
                return f"checksum of {name} does not match"
    return _folder_fault(cache)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _install(new: Path, cache: Path, alias: str, source: str) -> None:
    """Write the manifest, put everything on the disk for good, and rename the folder into place."""
    if fault := _folder_fault(new):
        raise ValueError(fault)
    paths = sorted(path for path in new.rglob("*") if path.is_file())
    for path in paths:
        path.chmod(path.stat().st_mode | 0o444)  # safetensors writes 0600; a worker may run as another user
    files = {p.relative_to(new).as_posix(): {"size": p.stat().st_size, "sha256": _sha256(p)} for p in paths}
    manifest = {"alias": alias, "source": source, "converter_version": CONVERTER_VERSION, "files": files}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    for path in [*paths, new / MANIFEST, *(p for p in new.rglob("*") if p.is_dir()), new]:
        _sync(path)
    if cache.exists():
        # A folder cannot replace a full one in one step. Who reads in between finds nothing and waits for our lock.
        old = new.with_name(new.name + "-old")
        cache.rename(old)
        new.rename(cache)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(cache)
    _sync(cache.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the hub ---


def _hugging_face_cache(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(folder) if _folder_fault(Path(folder)) is None else None


def _download(hub_id: str, revision: str | None, target: Path, starting: Callable[[], None]) -> None:
    from huggingface_hub import HfApi, snapshot_download

    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(HfApi().repo_info(hub_id, revision=revision, timeout=_HUB_TIMEOUT_S).sha)
        except Exception as error:  # carried to the caller's Python thread
            answer.append(error)

    asking = threading.Thread(target=ask, name="forq-hub-contact", daemon=True)
    asking.start()
    asking.join(_HUB_DEADLINE_S)
    if not answer:
        raise TimeoutError(f"no answer within {_HUB_DEADLINE_S:g} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    starting()
    snapshot_download(hub_id, revision=answer[0], local_dir=target, allow_patterns=_HUB_FILES)
    shutil.rmtree(target / ".cache", ignore_errors=True)  # the client's own notes about local_dir


# --- GGUF ---


def main(arguments: list[str]) -> int:
    """Resolve one alias, print one line, and return the exit code."""
    try:
        settings = get_settings()
        alias = arguments[0] if arguments else settings.default_model
        found = resolve_model(alias, settings, report=lambda line: print(line, file=sys.stderr))
    except ForqError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"model {found.alias} is ready ({found.source}): {found.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
