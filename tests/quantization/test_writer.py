"""Files are whole or not there, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.writer import (
    read_shard,
    shard_name,
    write_index,
    write_json,
    write_shard,
)


def test_a_shard_comes_back_with_its_note(tmp_path: Path) -> None:
    path = tmp_path / shard_name(0, 3)
    assert path.name == "model-00001-of-00003.safetensors"
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    assert write_shard(path, tensors, {"layer": 7}) == 6 * 8 + 4 * 2
    found, note = read_shard(path)
    assert note == {"layer": 7}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_others_can_read_it_as_the_person_lets_them(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_shard(tmp_path / "shard", {"a": torch.ones(1)}, {})
    assert (tmp_path / "shard").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_is_cut_off_or_foreign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, {"a": torch.ones(100)}, {})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"x\.safetensors: cannot be read"):
        read_shard(path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ConfigError, match="is not of this program"):
        read_shard(path)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_shard(gone / "a", {"a": torch.ones(1)}, {})
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(gone / "a.json", {})


def test_the_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "one", "b": "two"}, 12)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"a": "one", "b": "two"}}
