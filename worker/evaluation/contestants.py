"""Finds the two models of an evaluation and gives both the same engine options."""

from dataclasses import dataclass, replace
from pathlib import Path

from jobs.errors import BadInput
from jobs.forking import read_model_options
from jobs.settings import ForkSettings, KVBudget, ModelAlias, Settings
from worker.engine import on_cpu
from worker.model_cache import Report
from worker.models import resolve_model

FOLDER_KV_BUDGET = KVBudget(amount=1 << 30, unit="bytes")
"""Of a folder that no alias describes, on a CPU; on a GPU vLLM takes its own share."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model folder and how to run it."""

    name: str
    """As the user gave it."""
    path: Path
    alias: ModelAlias

    def with_blocks(self, num_blocks: int) -> "Contestant":
        """With a KV budget of so many blocks."""
        budget = KVBudget(amount=num_blocks, unit="blocks")
        return replace(self, alias=self.alias.model_copy(update={"kv_budget": budget}))


def find_contestants(
    model: str, base: str | None, settings: Settings, *, kv_budget: KVBudget | None, dtype: str | None, say: Report
) -> tuple[Contestant, Contestant]:
    """Find the model and its base, with equal engine options: those of the model's alias, else of the base's.

    Without `base`, the model's alias names it, or the key `apar.base` of the model's `config.json`.

    Raises:
        BadInput: a name is neither an alias nor a model folder, or no base is known.
        Unavailable: an alias's model is nowhere to be found.
    """
    model_path, model_alias = _locate(model, "the model", settings, say)
    if base is None:
        base = (model_alias and model_alias.base) or _named_base(model, model_path, settings)
    base_path, base_alias = _locate(base, "the base", settings, say)
    shared = model_alias or base_alias or ModelAlias(kv_budget=FOLDER_KV_BUDGET if on_cpu() else None)
    budget = kv_budget or shared.kv_budget
    chosen = dtype or (_own_dtype(base_path) if shared.dtype == "auto" else shared.dtype)
    engine = {"use_tqdm_on_load": False, **shared.engine}
    shared = shared.model_copy(update={"kv_budget": budget, "dtype": chosen, "engine": engine})
    # What the model's alias says of forking is true of the model alone.
    plain = shared.model_copy(update={"fork_token": None, "child_token": None, "forks": ForkSettings()})
    own = shared if model_alias is not None else plain
    return Contestant(model, model_path, own), Contestant(base, base_path, plain)


def _locate(name: str, what: str, settings: Settings, say: Report) -> tuple[Path, ModelAlias | None]:
    if name in settings.models:
        return resolve_model(name, settings, report=say).path, settings.models[name]
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.absolute(), None
    known = ", ".join(sorted(settings.models))
    fault = "a folder without config.json" if folder.is_dir() else "neither a configured alias nor a folder"
    raise BadInput(f"{what} {name!r} is {fault}: give a Hugging Face model folder or one of {known}")


def _named_base(model: str, path: Path, settings: Settings) -> str:
    named = (read_model_options(path) or {}).get("base")
    if isinstance(named, str) and (named in settings.models or (Path(named).expanduser() / "config.json").is_file()):
        return named
    found = f"names the base {named!r}, which is not here" if named else "does not name its base"
    raise BadInput(f"the config.json of model {model!r} {found}: say --base ALIAS or --base FOLDER")


def _own_dtype(path: Path) -> str:
    """What the base's weights are in, so that vLLM's `auto` does not choose another type for each of the two."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises what it likes here
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"the base's config.json in {path} cannot be read: {reason}") from None
    found = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return found if found in ("bfloat16", "float16", "float32") else "auto"
