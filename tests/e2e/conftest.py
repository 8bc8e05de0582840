from collections.abc import Iterator
from pathlib import Path

import pytest
from service import CONFIGURATION, MODEL, Service


@pytest.fixture(scope="module")
def idle_service(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A fresh FORQ_HOME with the real model; nothing runs yet."""
    home = tmp_path_factory.mktemp("e2e") / "home"
    service = Service(home, CONFIGURATION.format(model=MODEL, path=smollm2_path))
    yield service
    service.clean_up()


@pytest.fixture(scope="module")
def service(idle_service: Service) -> Service:
    """The whole service, up."""
    idle_service.up()
    return idle_service
