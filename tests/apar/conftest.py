"""A tiny model that forks, and its sequential reference, for tests that run real engines in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    """vLLM's engine core in this process. vLLM reads this whenever it starts an engine, so other tests keep theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("engines") / "tiny")


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> Any:
    return reference_of(tiny_folder)


@pytest.fixture(scope="session")
def forky_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forks at every turn, three levels deep."""
    from tiny_models import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("engines") / "forky", seed=5, fork_scale=2.6, end_scale=2.2, max_depth=3
    )


@pytest.fixture(scope="session")
def forky_reference(forky_folder: Path) -> Any:
    return reference_of(forky_folder)


def reference_of(folder: Path) -> Any:
    import torch
    from engines import Reference
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
