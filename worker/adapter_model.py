"""Adapters: a folder that turns a base model into one that forks, small enough to be shipped inside this package.

An adapter folder is what `forq train --method lora` writes: LoRA weights and the rows of the two control tokens in
peft's layout, and `apar.json`, which names those tokens. Merged into its base once, it gives an ordinary model folder.
"""

import hashlib
import importlib.util
import re
from pathlib import Path

FILES = ("apar.json", "adapter_config.json", "adapter_model.safetensors")
MERGE_VERSION = 1
"""Raised whenever a merge's output changes, so that older caches are rebuilt."""
_PACKAGED = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<folder>[^/:].*)")


def adapter_folder(name: str) -> Path:
    """Locate `module:folder`, without importing the module, or a path.

    Raises:
        FileNotFoundError: there is no such folder, or it is not an adapter's; the message says which.
    """
    packaged = _PACKAGED.fullmatch(name)
    if packaged is None:
        places, missing = [Path(name).expanduser().absolute()], "no such folder"
    else:
        places = _in_package(packaged["module"], packaged["folder"])
        missing = "the installed package does not contain it"
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(missing)
    for file in FILES:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} has no {file}")
    return folder


def adapter_digest(folder: Path) -> str:
    """A checksum of all that a merge reads of an adapter: another one gives another model."""
    digest = hashlib.sha256(str(MERGE_VERSION).encode())
    for file in FILES:
        with (folder / file).open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write the base model with the adapter in it as a model folder of its own."""
    from apar.training.adapter import merge as merge_adapter  # torch, transformers and peft: seconds

    merge_adapter(base, adapter, target)


def _in_package(module: str, folder: str) -> list[Path]:
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    return [Path(place).joinpath(*inner, folder) for place in (spec.submodule_search_locations or [])] if spec else []
