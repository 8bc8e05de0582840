"""Fixtures that more than one room's tests use."""

import os
from pathlib import Path

import pytest
from small_disks import small_disk

from jobs.errors import Unavailable
from jobs.settings import DEFAULT_MODEL, get_settings
from worker.models import resolve_model

__all__ = ["small_disk"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled small model, from FORQ_HOME's cache; fetched or converted there the first time."""
    try:
        return resolve_model(DEFAULT_MODEL, get_settings(), report=print).path
    except Unavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
