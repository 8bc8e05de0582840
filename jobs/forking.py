"""Whether a model can fork, judged where a job is submitted: from the configuration and, where it lies here, the model.

No engine and no tokenizer are asked: submitting must work on a machine that has neither.
"""

import json
from pathlib import Path
from typing import Any

from jobs.errors import BadInput
from jobs.settings import Settings

DECODINGS = ("apar", "ar")


def check_decoding(settings: Settings, alias: str, decoding: str) -> None:
    """Refuse a decoding that does not exist, and `apar` for a model that is not known to fork.

    A model is known to fork when its alias names both control tokens or an adapter of ours, which brings them, or when
    its folder is on this machine and its `config.json` has the key `apar`.

    Raises:
        BadInput: one line with the remedy; also for an unknown alias.
    """
    spec = settings.model(alias)
    if decoding not in DECODINGS:
        raise BadInput(f"decoding is {decoding!r}: use apar or ar")
    if decoding == "ar" or spec.control_tokens or spec.adapter is not None:
        return
    folders = [settings.home / "models" / alias] if spec.path is None else [spec.path.expanduser()]
    if any(read_model_options(folder) for folder in folders):
        return
    raise BadInput(
        f"model {alias!r} is not known to fork: name fork_token and child_token in [models.{alias}] of forq.toml, "
        "or use --decoding ar"
    )


def read_model_options(folder: Path) -> dict[str, Any] | None:
    """The key `apar` of a model folder's `config.json`: control token ids and limits. None where there is none."""
    try:
        found = json.loads((folder / "config.json").read_text("utf-8")).get("apar")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None
