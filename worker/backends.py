"""Which engine an alias gets."""

from typing import Any

from jobs.settings import ModelAlias
from worker.engine import VllmBackend
from worker.engine_thread import EngineThread
from worker.forking import Forking


def make_backend(alias: ModelAlias, model_path: str, forking: Forking | None) -> EngineThread[Any]:
    """The alias's engine, not yet started. Of vLLM and the reference backend's libraries only one is loaded."""
    if alias.backend == "vllm":
        return VllmBackend(alias, model_path, forking)
    from worker.reference import ReferenceBackend

    return ReferenceBackend(alias, model_path, forking)
