"""One fake-model server for all modules that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.model_folder import write_model_folder
from tests.server.running import Running, fake_config, running


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "fake")


@pytest.fixture(scope="session")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(fake_config(fake_model), tmp_path_factory.mktemp("server")) as started:
        yield started
