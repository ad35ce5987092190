"""The tokenizer that is read while the engine starts is the one that is served."""

from __future__ import annotations

import asyncio
import gc
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.server.config import ServeConfig
from ridgeline.server.model import text_folder
from ridgeline.server.service import Service
from ridgeline.server.text_client import ForkServer
from ridgeline.server.text_wire import Loaded, LoadText
from ridgeline.server.wire import Ready
from tests.tiny_model import write_tokenizer

READY = Ready(1, "", "m", 261, 512, 16, 64, 8, (2,), (), (), 0, 512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = tmp_path / "model"
    here.mkdir()
    write_tokenizer(here)
    return here


def serve(model: str) -> Service:
    return Service(ServeConfig(engine=EngineConfig(model=model)), WallClock())


def ready_in(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Reads early, becomes ready for the model in `folder`; what was read, in order."""
    read: list[Path] = []
    load = ForkServer.load

    async def watched(self: ForkServer, where: LoadText) -> Loaded:
        read.append(Path(where.folder))
        return await load(self, where)

    async def both() -> None:
        early = asyncio.create_task(service.read_early())
        await asyncio.sleep(0)
        try:
            await service.on_ready(replace_path(READY, folder))
        finally:
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            await service.text.close()

    monkeypatch.setattr(ForkServer, "load", watched)
    asyncio.run(both())
    service.pool.shutdown()
    return read


def replace_path(ready: Ready, folder: Path) -> Ready:
    fields = {name: getattr(ready, name) for name in ready.__struct_fields__}
    return Ready(**fields | {"model_path": str(folder)})


def test_it_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(str(folder))
    assert ready_in(service, folder, monkeypatch) == [folder]
    assert service.model is not None
    assert service.model.vocabulary is not None
    assert service.model.has_chat_template


def test_another_folder_than_expected_is_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert ready_in(serve(str(folder)), other, monkeypatch) == [folder, other]


def test_a_name_of_the_hub_waits_for_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ready_in(serve("demo:chat"), folder, monkeypatch) == [folder]


def test_a_broken_tokenizer_is_refused_when_the_engine_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        ready_in(serve(str(folder)), folder, monkeypatch)


def test_where_the_tokenizer_is(folder: Path, tmp_path: Path) -> None:
    config = ServeConfig(engine=EngineConfig(model=str(folder)))
    assert text_folder(config) == folder
    elsewhere = replace(config, engine=replace(config.engine, tokenizer=str(tmp_path)))
    assert text_folder(elsewhere) == tmp_path
    assert text_folder(replace(config, engine=EngineConfig(model="demo:chat"))) is None


def test_what_is_there_when_it_is_ready_is_not_collected_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()
    ready_in(serve(str(folder)), folder, monkeypatch)
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()
