"""Compiled kernels lie where their versions say, and nothing but old ones of ours is removed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ridgeline.kernels.cache import (
    KEPT,
    NAME,
    VARIABLE,
    KernelCounts,
    Versions,
    find_damage,
    prepare_kernels,
    use_kernel_cache,
)

VERSIONS = Versions("0.1.0", "2.11.0+cu128", "3.6.0", (9, 0))
FOLDER = "ridgeline-0.1.0-torch-2.11.0+cu128-triton-3.6.0-sm90"


def environment(home: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(home)}


def write_kernel(folder: Path, key: str = "ABC") -> Path:
    """A kernel as Triton writes it: its parts, and a group that names them."""
    where = folder / key
    where.mkdir(parents=True)
    parts = {"k.json": '{"name": "k"}', "k.cubin": "binary", "k.ptx": "text"}
    for name, text in parts.items():
        (where / name).write_text(text)
    group = {"child_paths": {name: str(where / name) for name in parts}}
    (where / "__grp__k.json").write_text(json.dumps(group))
    return where


def test_versions_name_the_folder(tmp_path: Path) -> None:
    environ = environment(tmp_path)
    folder = use_kernel_cache(VERSIONS, environ)
    assert folder == tmp_path / "ridgeline" / "kernels" / FOLDER
    assert folder.is_dir()
    assert environ[VARIABLE] == str(folder)
    assert NAME.fullmatch(FOLDER)
    for other in (
        Versions("0.2.0", "2.11.0+cu128", "3.6.0", (9, 0)),
        Versions("0.1.0", "2.12.0+cu128", "3.6.0", (9, 0)),
        Versions("0.1.0", "2.11.0+cu128", "3.7.0", (9, 0)),
        Versions("0.1.0", "2.11.0+cu128", "3.6.0", (10, 0)),
    ):
        assert other.folder != FOLDER
        assert NAME.fullmatch(other.folder)
    assert "/" not in Versions("../x", "a/b", "c", (9, 0)).folder


def test_a_folder_that_somebody_has_set_is_theirs(tmp_path: Path) -> None:
    environ = environment(tmp_path) | {VARIABLE: str(tmp_path / "theirs")}
    assert use_kernel_cache(VERSIONS, environ) == tmp_path / "theirs"
    assert list(tmp_path.iterdir()) == []


def test_a_second_start_finds_what_the_first_has_left(tmp_path: Path) -> None:
    kernel = write_kernel(use_kernel_cache(VERSIONS, environment(tmp_path)))
    folder = use_kernel_cache(VERSIONS, environment(tmp_path))
    assert kernel.parent == folder
    assert (kernel / "k.cubin").read_text() == "binary"


@pytest.mark.parametrize("how", ["empty", "gone", "group", "metadata", "list"])
def test_a_damaged_cache_starts_afresh(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = use_kernel_cache(VERSIONS, environment(tmp_path))
    write_kernel(folder, "GOOD")
    kernel = write_kernel(folder)
    assert find_damage(folder) is None
    if how == "empty":
        (kernel / "k.cubin").write_bytes(b"")
    elif how == "gone":
        (kernel / "k.ptx").unlink()
    elif how == "metadata":
        (kernel / "k.json").write_text("{")
    else:
        (kernel / "__grp__k.json").write_text("{" if how == "group" else "[1]")
    assert find_damage(folder) is not None
    with caplog.at_level(logging.WARNING):
        assert use_kernel_cache(VERSIONS, environment(tmp_path)) == folder
    assert list(folder.iterdir()) == []
    [record] = caplog.records
    assert record.getMessage().startswith("the cache of kernels is damaged, starting afresh at=")


def test_where_nothing_can_be_written_kernels_last_as_long_as_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ridgeline").write_text("a file, where a folder should be")
    environ = environment(tmp_path)
    with caplog.at_level(logging.WARNING):
        folder = use_kernel_cache(VERSIONS, environ)
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    assert environ[VARIABLE] == str(folder)
    [record] = caplog.records
    assert record.getMessage().startswith("compiled kernels cannot be kept reason=")


def test_the_oldest_of_ours_are_removed_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "ridgeline" / "kernels"
    others = [Versions(f"0.0.{i}", "2.11.0", "3.6.0", (9, 0)).folder for i in range(KEPT + 2)]
    for age, name in enumerate(others):
        write_kernel(home / name)
        os.utime(home / name, (1_000_000 - age, 1_000_000 - age))
    elsewhere = tmp_path / "elsewhere"
    write_kernel(elsewhere)
    strange = home / "notes"
    strange.mkdir()
    link = home / Versions("9.9.9", "2.11.0", "3.6.0", (9, 0)).folder
    link.symlink_to(elsewhere, target_is_directory=True)
    ours = use_kernel_cache(VERSIONS, environment(tmp_path))
    left = {path.name for path in home.iterdir()}
    assert left == {ours.name, strange.name, link.name, *others[: KEPT - 1]}
    assert (elsewhere / "ABC" / "k.cubin").exists()


def test_a_cpu_compiles_nothing() -> None:
    before = os.environ.get(VARIABLE)
    assert prepare_kernels(torch.device("cpu")) is None
    assert os.environ.get(VARIABLE) == before


def test_counts_are_what_triton_says(caplog: pytest.LogCaptureFixture) -> None:
    counts = KernelCounts()
    assert counts.text() == ""
    times = SimpleNamespace(total=1_500_000)
    source = SimpleNamespace(name="add_norm")
    with caplog.at_level(logging.INFO):
        counts(src=source, metadata={}, metadata_group={}, times=times, cache_hit=False)
        counts(src=source, metadata={}, metadata_group={}, times=times, cache_hit=True)
    assert counts.text() == "1 kernels compiled in 1.50 s, 1 found in 1.50 s"
    [record] = caplog.records
    assert record.getMessage() == "compiled a kernel name=add_norm seconds=1.50"
