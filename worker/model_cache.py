"""A folder that holds one finished model: written beside its place, checked, synced, renamed into place under a lock.

Its manifest says from what it was made. A crash leaves no half model, and two processes make it once.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from apar.files import put_in_place

MANIFEST = "forq-manifest.json"
CONVERTER_VERSION = 1
"""Raised whenever the conversion's output changes, so that older caches are rebuilt."""
_HASH_LIMIT_BYTES = 2 << 30
"""Larger models are checked by size alone: hashing them would cost seconds at every start."""

Report = Callable[[str], None]


@contextmanager
def locked(cache: Path, report: Report) -> Iterator[None]:
    """Let one process at a time fill this cache."""
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


def folder_fault(folder: Path, *, pickles: bool = False) -> str | None:
    """Say why vLLM could not load this folder, or None.

    `pickles` lets `pytorch_model*.bin` count as weights, as released checkpoints have them: vLLM and transformers read
    nothing but tensors from such a file.
    """
    if not folder.is_dir():
        return "no such folder"
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    kinds = [("model.safetensors.index.json", "*.safetensors")]
    if pickles:
        kinds.append(("pytorch_model.bin.index.json", "pytorch_model*.bin"))
    for index, weights in kinds:
        if (folder / index).is_file():
            return _index_fault(folder / index)
        if any(folder.glob(weights)):
            return None
    return "it has no .safetensors weights"


def source_of(cache: Path) -> str | None:
    """What a cached model was made from, as its manifest says; None where there is no manifest to read."""
    try:
        source = json.loads((cache / MANIFEST).read_text("utf-8"))["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return source if isinstance(source, str) else None


def cache_fault(cache: Path, sources: Collection[str]) -> str | None:
    """Say why the cache does not hold a model of one of these sources whole, or None."""
    try:
        manifest = json.loads((cache / MANIFEST).read_text("utf-8"))
        source = manifest["source"]
        files = {str(k): (int(v["size"]), v["sha256"]) for k, v in manifest["files"].items()}
    except FileNotFoundError:
        return "no manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"
    if source not in sources:
        return f"it holds {source}, which the configuration does not ask for"
    for name, (size, _) in files.items():
        path = cache / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if sum(size for size, _ in files.values()) < _HASH_LIMIT_BYTES:
        for name, (_, digest) in files.items():
            if sha256_of(cache / name) != digest:
                return f"checksum of {name} does not match"
    return folder_fault(cache)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(new: Path, cache: Path, alias: str, source: str) -> None:
    """Write the manifest, put everything on the disk for good, and rename the folder into place."""
    if fault := folder_fault(new):
        raise ValueError(fault)
    paths = sorted(path for path in new.rglob("*") if path.is_file())
    files = {p.relative_to(new).as_posix(): {"size": p.stat().st_size, "sha256": sha256_of(p)} for p in paths}
    manifest = {"alias": alias, "source": source, "converter_version": CONVERTER_VERSION, "files": files}
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    put_in_place(new, cache)  # who reads while there is none waits for our lock


def _index_fault(index: Path) -> str | None:
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return f"{index.name} cannot be read"
    missing = sorted(name for name in shards if not (index.parent / name).is_file())
    return f"{len(missing)} weight files are missing, {missing[0]} first" if missing else None
