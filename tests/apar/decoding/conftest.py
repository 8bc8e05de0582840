"""The tiny model behind the decoders."""

from pathlib import Path

import pytest

from apar.decoding import TreeModel, load_model


@pytest.fixture(scope="session")
def tree_model(tiny_folder: Path) -> TreeModel:
    return load_model(tiny_folder, "float32")
