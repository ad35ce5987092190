"""A pack gives back what was kept or nothing, whatever became of its file."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.config import EngineConfig, check_numbers
from ridgeline.errors import ConfigError
from ridgeline.loader import packs as packs_module
from ridgeline.loader.checkpoint import open_checkpoint
from ridgeline.loader.packs import FOLDER, Packs, checksum, open_packs, pack_key
from tests.loader.write import write_safetensors

KEY, OTHER, THIRD = (letter * 64 for letter in "abc")


def some_tensors(seed: int = 3) -> dict[str, torch.Tensor]:
    """Large and small, of whole lines and not, empty and of several dtypes."""
    print(f"{seed=}")
    noise = torch.Generator().manual_seed(seed)
    return {
        "0.panels": torch.randint(0, 256, (40, 20, 64), dtype=torch.uint8, generator=noise),
        "0.shape": torch.empty(640, 40, 0),
        "0.scale": torch.randn(641, generator=noise),
        "1.weight": torch.randn(7, generator=noise).bfloat16(),
        "2.panels": torch.randint(0, 256, (9, 5, 64), dtype=torch.uint8, generator=noise),
    }


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    return Packs(tmp_path / FOLDER, worth_bytes=0)


def file_of(packs: Packs, key: str = KEY) -> Path:
    return packs.folder / f"{key}.safetensors"


def same(found: dict[str, torch.Tensor] | None, wanted: dict[str, torch.Tensor]) -> bool:
    if found is None or list(found) != list(wanted):
        return False
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_what_was_kept_comes_back(packs: Packs) -> None:
    kept = some_tensors()
    assert packs.find(KEY) is None
    assert packs.keep(KEY, kept) == sum(tensor.nbytes for tensor in kept.values())
    found = packs.find(KEY)
    assert same(found, kept)
    assert found is not None
    for name, tensor in kept.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert not tensor.numel() or found[name].data_ptr() % 64 == 0
    assert packs.find(OTHER) is None
    assert [path.name for path in packs.folder.iterdir()] == [file_of(packs).name]


def test_the_file_may_go_while_its_tensors_are_in_use(packs: Packs) -> None:
    kept = some_tensors()
    packs.keep(KEY, kept)
    found = packs.find(KEY)
    packs.clear()
    assert not list(packs.folder.iterdir())
    assert same(found, kept)


def test_a_pack_is_no_other_s(packs: Packs) -> None:
    packs.keep(KEY, some_tensors())
    shutil.copyfile(file_of(packs), file_of(packs, OTHER))
    assert packs.find(OTHER) is None
    assert not file_of(packs, OTHER).exists()


def test_every_flipped_byte_is_seen(packs: Packs, caplog: pytest.LogCaptureFixture) -> None:
    kept = some_tensors()
    packs.keep(KEY, kept)
    whole = file_of(packs).read_bytes()
    choose = random.Random(5)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(16), header - 1, header, len(whole) - 1]
    places += [choose.randrange(len(whole)) for _ in range(150)]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << choose.randrange(8)
        file_of(packs).write_bytes(damaged)
        caplog.clear()
        found = packs.find(KEY)
        if found is not None:  # between two tensors
            assert same(found, kept)
            continue
        assert "packed weights are damaged" in caplog.text
        assert not file_of(packs).exists()


def test_a_file_cut_anywhere_is_seen(packs: Packs) -> None:
    packs.keep(KEY, some_tensors())
    whole = file_of(packs).read_bytes()
    choose = random.Random(6)
    lengths = [0, 1, 8, 4096, len(whole) - 1]
    for length in lengths + [choose.randrange(len(whole)) for _ in range(20)]:
        file_of(packs).write_bytes(whole[:length])
        assert packs.find(KEY) is None
    file_of(packs).write_bytes(whole + b"\0")
    assert packs.find(KEY) is None


def test_other_safetensors_are_no_pack(packs: Packs) -> None:
    packs.folder.mkdir(parents=True)
    write_safetensors(file_of(packs), {"0.weight": torch.ones(3)})
    assert packs.find(KEY) is None
    write_safetensors(file_of(packs), {"sums": torch.ones(3), "digest": torch.ones(3)})
    assert packs.find(KEY) is None


def test_sums_tell_where_the_numbers_are() -> None:
    """Exchanged pieces have the same numbers."""
    numbers = torch.arange(1 << 20, dtype=torch.int32)
    exchanged = numbers.roll(1 << 18)
    assert checksum(numbers) == checksum(numbers.clone()) != checksum(exchanged)
    assert checksum(torch.ones(3)) != checksum(torch.zeros(3))
    assert checksum(torch.empty(0)) == checksum(torch.empty(4, 0))


def test_a_small_model_is_not_worth_it(tmp_path: Path) -> None:
    assert Packs(tmp_path / "packs").keep(KEY, some_tensors()) == 0
    assert not (tmp_path / "packs").exists()


def test_what_was_used_longest_ago_goes_first(packs: Packs) -> None:
    size = sum(tensor.nbytes for tensor in some_tensors().values())
    small = Packs(packs.folder, most_bytes=3 * size, worth_bytes=0)
    for age, key in ((300, KEY), (200, OTHER)):
        assert small.keep(key, some_tensors())
        then = file_of(packs, key).stat().st_mtime - age
        os.utime(file_of(packs, key), (then, then))
    stranger = packs.folder / "notes.txt"
    stranger.write_text("mine")
    link = file_of(packs, "d" * 64)
    link.symlink_to(stranger)
    assert small.find(KEY) is not None  # used now
    assert small.keep(THIRD, some_tensors())
    assert small.find(OTHER) is None
    assert small.find(KEY) is not None
    assert small.find(THIRD) is not None
    assert small.find("d" * 64) is None
    small.clear()
    assert sorted(packs.folder.iterdir()) == sorted([stranger, link])


def test_a_pack_larger_than_all_may_be_is_not_kept(packs: Packs) -> None:
    assert Packs(packs.folder, most_bytes=100, worth_bytes=0).keep(KEY, some_tensors()) == 0


def test_a_full_disk_is_said(
    packs: Packs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs.keep(OTHER, some_tensors())
    usage = shutil.disk_usage(packs.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert packs.keep(KEY, some_tensors()) == 0
    assert "cannot be kept" in caplog.text
    assert "--pack-cache off" in caplog.text
    assert not list(packs.folder.iterdir())  # room was made, and was not enough


@pytest.mark.parametrize("what", ["write", "mkdir"])
def test_a_disk_that_cannot_be_written_is_said(
    packs: Packs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if what == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    else:
        monkeypatch.setattr(packs_module, "_bytes", fail)
    assert packs.keep(KEY, some_tensors()) == 0
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert packs.find(KEY) is None
    assert not packs.folder.exists() or not list(packs.folder.iterdir())


def test_unfinished_files_of_yesterday_are_removed(packs: Packs) -> None:
    packs.folder.mkdir(parents=True)
    old, new = (packs.folder / f"unfinished-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    packs.keep(KEY, some_tensors())
    assert (old.exists(), new.exists()) == (False, True)


def test_many_at_once(packs: Packs) -> None:
    """Whoever looks while others write and remove sees a whole pack or none."""
    kept, seen = some_tensors(), []

    def work(number: int) -> None:
        for turn in range(12):
            packs.keep(KEY, kept)
            seen.append((found := packs.find(KEY)) is None or same(found, kept))
            if (turn + number) % 4 == 0:
                packs.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 48
    assert all(seen)


# ---------------------------------------------------------------------- whose it is


def change_time(file: Path) -> None:
    os.utime(file, (1, 1))


def change_length(file: Path) -> None:
    write_safetensors(file, {"a": torch.ones(8)})


def change_names(file: Path) -> None:
    write_safetensors(file, {"b": torch.ones(4)})


@pytest.mark.parametrize("change", [change_time, change_length, change_names])
def test_the_key_follows_the_files(tmp_path: Path, change: Callable[[Path], None]) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": torch.ones(4)})
    before = pack_key(open_checkpoint(tmp_path), ["bfloat16"])
    assert before == pack_key(open_checkpoint(tmp_path), ["bfloat16"])
    assert before != pack_key(open_checkpoint(tmp_path), ["float32"])
    change(file)
    assert before != pack_key(open_checkpoint(tmp_path), ["bfloat16"])


def test_a_checkpoint_that_goes_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(4)})
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors: cannot be read"):
        pack_key(checkpoint, [])


def test_the_ways(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert open_packs("off", environ) is None
    packs = open_packs("auto", environ)
    assert packs == Packs(tmp_path / FOLDER)
    Packs(tmp_path / FOLDER, worth_bytes=0).keep(KEY, some_tensors())
    assert open_packs("auto", environ) is not None
    assert file_of(packs).exists()
    assert open_packs("clear", environ) == packs
    assert not file_of(packs).exists()
    with pytest.raises(ConfigError, match="unknown pack_cache 'on'; choose one of auto, off, cl"):
        check_numbers(EngineConfig(model="m", pack_cache="on"))


def test_the_file_is_a_safetensors_file(packs: Packs) -> None:
    from safetensors.torch import load_file

    kept = some_tensors()
    packs.keep(KEY, kept)
    found = load_file(file_of(packs))
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    raw = file_of(packs).read_bytes()
    assert json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["sums"]["shape"] == [40]
