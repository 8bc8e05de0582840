"""A tiny model that forks, and its sequential reference, for tests that run real engines in this process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anybody imports torch: these models are too small to share among cores, and a thread per core that waits for
# its part takes the cores from whatever else runs on the machine.
os.environ["OMP_NUM_THREADS"] = "1"
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    """vLLM's engine core in this process. vLLM reads this whenever it starts an engine, so other tests keep theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="module", params=["roomy", "tight"])
def shared(request: pytest.FixtureRequest, in_process: None, tiny_folder: Path, tiny_reference: Any) -> Iterator[Any]:
    """An engine for the tests of a module; those that need others have a fixture of the same name."""
    from engines import ROOMY, TIGHT, engine

    with engine(tiny_folder, {"roomy": ROOMY, "tight": TIGHT}[request.param], tiny_reference) as started:
        yield started


@pytest.fixture
def running(shared: Any) -> Iterator[Any]:
    """The same engine for one test: idle before it, and behind it, too."""
    shared.watch.clear()
    try:
        yield shared
        shared.assert_empty()
    finally:
        shared.reset()


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
