"""Which decodings a model can be asked for, judged where a job is submitted: from the configuration and, where it lies
here, the model.

No engine and no tokenizer are asked: submitting must work on a machine that has neither.
"""

import json
from pathlib import Path
from typing import Any

from jobs.errors import BadInput
from jobs.settings import ModelAlias, Settings

DECODINGS = ("ar", "apar", "medusa", "apar+medusa", "ptd", "apar+ptd", "lade", "apar+lade")
"""As `apar.decoding.DECODERS`, which is not imported here."""
VLLM_DECODINGS = ("apar", "ar")


def check_decoding(settings: Settings, alias: str, decoding: str) -> None:
    """Refuse a decoding that does not exist, that the alias's backend does not have, or that its model is not known to
    be made for.

    A model is known to fork when its alias names both control tokens or an adapter of ours, which brings them, or when
    its folder is on this machine and its `config.json` has the key `apar`. It has Medusa heads when its alias names
    their folder.

    Raises:
        BadInput: one line with the remedy; also for an unknown alias.
    """
    spec = settings.model(alias)
    if spec.backend == "vllm" and decoding not in VLLM_DECODINGS:
        raise BadInput(_not_vllms(alias, decoding))
    if decoding not in DECODINGS:
        raise BadInput(f"decoding is {decoding!r}: use {_listed(DECODINGS)}")
    if drafter_of(decoding) == "medusa" and spec.reference.medusa is None:
        raise BadInput(
            f"model {alias!r} has no Medusa heads: name the folder of forq train-medusa as medusa in "
            f"[models.{alias}.reference] of forq.toml, or use --decoding {decoding.replace('medusa', 'ptd')}"
        )
    if forks(decoding) and not _is_known_to_fork(settings, alias, spec):
        raise BadInput(
            f"model {alias!r} is not known to fork: name fork_token and child_token in [models.{alias}] of forq.toml, "
            f"or use --decoding {drafter_of(decoding) or 'ar'}"
        )


def forks(decoding: str) -> bool:
    """Whether a decoding forks the answers of a model that can."""
    return decoding.split("+")[0] == "apar"


def drafter_of(decoding: str) -> str | None:
    """What drafts in a decoding: `medusa`, `ptd` or `lade`; None where nothing does."""
    last = decoding.split("+")[-1]
    return None if last in VLLM_DECODINGS else last


def read_model_options(folder: Path) -> dict[str, Any] | None:
    """The key `apar` of a model folder's `config.json`: control token ids and limits. None where there is none."""
    try:
        found = json.loads((folder / "config.json").read_text("utf-8")).get("apar")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def _is_known_to_fork(settings: Settings, alias: str, spec: ModelAlias) -> bool:
    if spec.control_tokens or spec.adapter is not None:
        return True
    folders = [settings.home / "models" / alias] if spec.path is None else [spec.path.expanduser()]
    return any(read_model_options(folder) for folder in folders)


def _not_vllms(alias: str, decoding: str) -> str:
    use = _listed(VLLM_DECODINGS)
    if decoding not in DECODINGS:
        return f"decoding is {decoding!r}: use {use}"
    return (
        f"decoding is {decoding!r}, which model {alias!r} does not have on vLLM: use {use}, or say "
        f'backend = "reference" in [models.{alias}] of forq.toml'
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
