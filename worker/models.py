"""Turns a model alias into a local folder that vLLM loads.

Receives an alias and the settings; hands on a `ModelFiles`. Sources, in this order: the configured `path`, the cache
under `FORQ_HOME/models/<alias>`, the Hugging Face hub, a GGUF file inside an installed Python package. An alias with an
adapter has its base's model instead, merged. What is fetched, converted or merged goes through `worker.model_cache`.

    python -m worker.models [ALIAS ...]     fetch, convert or merge now, as set-up does
"""

import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jobs.errors import ForqError, Unavailable
from jobs.settings import ModelAlias, Settings, get_settings
from worker.adapter_model import adapter_digest, adapter_folder, merge
from worker.gguf_model import convert, packaged_file
from worker.model_cache import (
    CONVERTER_VERSION,
    MANIFEST,
    Report,
    cache_fault,
    folder_fault,
    install,
    locked,
    source_of,
)

__all__ = ["MANIFEST", "ModelFiles", "resolve_model"]

_HUB_TIMEOUT_S = 2.0
_HUB_DEADLINE_S = 5.0
"""For the whole first contact: name resolution and the client's own retries escape `_HUB_TIMEOUT_S`."""
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
"""No pickles from strangers: with some readers, loading one runs whatever code it holds."""


@dataclass(frozen=True)
class ModelFiles:
    """A model folder in the Hugging Face layout, ready to load, and where this call found it."""

    alias: str
    path: Path
    source: Literal["path", "cache", "hub", "gguf", "adapter"]


def resolve_model(alias: str, settings: Settings, *, report: Report) -> ModelFiles:
    """Find the alias's model on this machine; fetch, convert or merge it once if need be.

    `report` gets one line per thing worth telling: a download, a conversion, a damaged cache.

    Raises:
        BadInput: if the alias is not configured.
        Unavailable: if no source has the model; names what was tried and the remedy.
    """
    spec = settings.model(alias)
    if spec.adapter is not None:
        return _with_adapter(alias, spec, settings, report)
    tried: list[str] = []
    if spec.path is not None:
        path = _own_path(spec.path)
        fault = folder_fault(path, pickles=True)
        if fault is None:
            return ModelFiles(alias, path, "path")
        tried.append(f"path {path}: {fault}")
        report(f"model {alias}: configured path {path} cannot be used: {fault}")
    if spec.hub_id is None and spec.packaged_gguf is None:
        raise _unavailable(alias, tried)
    cache = settings.home / "models" / alias
    if cache_fault(cache, _cached_sources(spec)) is None:
        return ModelFiles(alias, cache, "cache")
    try:
        with locked(cache, report):
            return _fill_cache(alias, spec, cache, tried, report)
    except OSError as error:
        tried.append(f"cache {cache}: {_one_line(error)}")
        raise _unavailable(alias, tried) from error


def _with_adapter(alias: str, spec: ModelAlias, settings: Settings, report: Report) -> ModelFiles:
    """The base's model with the adapter in it: from the cache, else merged now."""
    assert spec.adapter is not None
    assert spec.base is not None
    remedy = f"mend `adapter` of [models.{alias}], or use the alias {spec.base!r} without it"
    try:
        adapter = adapter_folder(spec.adapter)
        digest = adapter_digest(adapter)
    except OSError as error:
        reason = f"adapter {spec.adapter}: {' '.join(str(error).split())}"
        raise Unavailable(f"model {alias!r} is not available: {reason}. Remedy: {remedy}") from error
    base_spec = settings.model(spec.base)
    cache = settings.home / "models" / alias
    made = {_merged_source(source, digest) for source in _sources(base_spec)}
    # The base itself is not needed, and so not looked for, where the merged model is there and whole.
    if cache_fault(cache, made) is None:
        return ModelFiles(alias, cache, "cache")
    try:
        with locked(cache, report):
            new = _make_room(alias, cache, made, report)
            if new is None:
                return ModelFiles(alias, cache, "cache")
            base = resolve_model(spec.base, settings, report=report)
            report(f"model {alias}: merging its adapter into {spec.base}, once")
            try:
                merge(base.path, adapter, new)
                install(new, cache, alias, _merged_source(_source_of(base, base_spec), digest))
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except Unavailable as error:
        raise Unavailable(f"model {alias!r} needs its base: {error}") from error
    except Exception as error:  # whatever peft, torch and transformers make of files that do not fit together
        reason = f"merging {spec.adapter} into {spec.base}: {_one_line(error)}"
        raise Unavailable(f"model {alias!r} is not available: {reason}. Remedy: {remedy}") from error
    return ModelFiles(alias, cache, "adapter")


def _fill_cache(alias: str, spec: ModelAlias, cache: Path, tried: list[str], report: Report) -> ModelFiles:
    new = _make_room(alias, cache, _cached_sources(spec), report)
    if new is None:
        return ModelFiles(alias, cache, "cache")
    try:
        if spec.hub_id is not None:
            try:
                # A complete snapshot in the user's Hugging Face cache is content-addressed: it needs no copy of ours.
                snapshot = _hugging_face_cache(spec.hub_id, spec.revision)
                if snapshot is not None:
                    return ModelFiles(alias, snapshot, "hub")
                _download(spec.hub_id, spec.revision, new, lambda: report(f"model {alias}: downloading {spec.hub_id}"))
                install(new, cache, alias, _hub_source(spec))
                return ModelFiles(alias, cache, "hub")
            except Exception as error:  # the client raises its own, httpx's, OSError and ValueError: all mean "next"
                tried.append(f"hub {spec.hub_id}: {_one_line(error)}")
        if spec.packaged_gguf is not None:
            try:
                gguf_file = packaged_file(spec.packaged_gguf)
                report(f"model {alias}: converting {gguf_file.name}, once, in about half a minute")
                convert(gguf_file, new)
                install(new, cache, alias, _gguf_source(spec))
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


def _make_room(alias: str, cache: Path, sources: set[str], report: Report) -> Path | None:
    """Where to write the model, inside the lock; None when there is nothing to write."""
    # Checked again under the lock: another process may have finished, or a rename may have been under way before.
    fault = cache_fault(cache, sources)
    if fault is None:
        return None
    if cache.exists():
        report(f"model {alias}: the cache {cache} cannot be used ({fault}); rebuilding it")
    for leftover in cache.parent.glob(f".{alias}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return cache.parent / f".{alias}.new-{os.getpid()}"


# --- what a model was made from, as manifests say it ---


def _cached_sources(spec: ModelAlias) -> set[str]:
    return {_hub_source(spec), _gguf_source(spec)}


def _sources(spec: ModelAlias) -> set[str]:
    """What `resolve_model` may find for an alias with files of its own, in words that change with those files."""
    if spec.path is not None and folder_fault(path := _own_path(spec.path), pickles=True) is None:
        return {_path_source(path)}
    return _cached_sources(spec)


def _source_of(files: ModelFiles, spec: ModelAlias) -> str:
    if files.source == "path":
        return _path_source(files.path)
    return source_of(files.path) or _hub_source(spec)  # a snapshot in the Hugging Face cache has no manifest


def _path_source(path: Path) -> str:
    """Names, sizes and times instead of contents, which may be a hundred gigabytes."""
    stats = sorted((file.name, file.stat()) for file in path.iterdir() if file.is_file())
    told = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return f"path:{path}#{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _hub_source(spec: ModelAlias) -> str:
    return f"hub:{spec.hub_id}@{spec.revision or 'main'}"


def _gguf_source(spec: ModelAlias) -> str:
    return f"gguf:{spec.packaged_gguf}#{CONVERTER_VERSION}"


def _merged_source(base_source: str, digest: str) -> str:
    return f"{base_source} + adapter:{digest}"


def _own_path(path: Path) -> Path:
    return path.expanduser().absolute()


# --- the hub ---


def _hugging_face_cache(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(folder) if folder_fault(Path(folder)) is None else None


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


# --- the command ---


def main(arguments: list[str]) -> int:
    """Resolve these aliases, or the default one; print a line for each, and return the exit code."""
    try:
        settings = get_settings()
        for alias in arguments or [settings.default_model]:
            found = resolve_model(alias, settings, report=lambda line: print(line, file=sys.stderr))
            print(f"model {found.alias} is ready ({found.source}): {found.path}")
    except ForqError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
