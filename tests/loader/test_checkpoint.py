"""Every dtype and layout comes back bit for bit, and damaged folders are refused by name."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from ridgeline.errors import ConfigError, InternalError
from ridgeline.loader import Checkpoint, check_finite, check_tensors, open_checkpoint
from tests.loader.write import (
    NAMES,
    header_of,
    raw_bytes,
    write_raw,
    write_safetensors,
    write_sharded,
)

SMALL = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int16)}


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) % 50
    return values.to(torch.float32).to(dtype) if dtype.is_floating_point else values.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


def folder_with(tmp_path: Path, tensors: dict[str, torch.Tensor] = SMALL) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = {name: some(dtype, 3, 5) for dtype, name in NAMES.items()}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "last": some(torch.int8, 1),
    }
    checkpoint = open_checkpoint(folder_with(tmp_path, tensors))
    assert checkpoint.names() == list(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == NAMES[tensor.dtype]
        assert checkpoint.num_bytes(name) == tensor.numel() * tensor.element_size()
        assert same(checkpoint.tensor(name), tensor)
    assert checkpoint.total_bytes() == sum(map(checkpoint.num_bytes, tensors))
    assert "scalar" in checkpoint
    assert "nothing" not in checkpoint


def test_odd_offsets_are_read_too(tmp_path: Path) -> None:
    tensors = {"one": some(torch.uint8, 3), "two": some(torch.float32, 4), "three": SMALL["a"]}
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors, pad=False)
    checkpoint = open_checkpoint(folder)
    for name, tensor in tensors.items():
        assert same(checkpoint.tensor(name), tensor)
        assert checkpoint.tensor(name).data_ptr() % tensor.element_size() == 0


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 0, 2), (0, 1, 1), (1, 1, 2), (1, 3, 0)])
def test_slices(tmp_path: Path, dim: int, start: int, length: int) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path))
    assert torch.equal(
        checkpoint.slice("a", dim, start, length), SMALL["a"].narrow(dim, start, length)
    )


@pytest.mark.parametrize(("dim", "start", "length"), [(2, 0, 1), (-1, 0, 1), (0, 1, 2), (0, -1, 1)])
def test_slices_outside_are_our_own_mistake(
    tmp_path: Path, dim: int, start: int, length: int
) -> None:
    with pytest.raises(InternalError, match="slice outside"):
        open_checkpoint(folder_with(tmp_path)).slice("a", dim, start, length)


def test_tensors_outlive_the_checkpoint_and_writing_stays_private(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensor("a")
    tensor += 1
    checkpoint.close()
    with pytest.raises(InternalError, match="after close"):
        checkpoint.tensor("a")
    del checkpoint
    gc.collect()
    assert torch.equal(tensor, SMALL["a"] + 1)
    assert (folder / "model.safetensors").read_bytes() == before


def test_views_do_not_copy(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path))
    assert checkpoint.tensor("a").data_ptr() == checkpoint.tensor("a").data_ptr()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tensor 'c'"):
        open_checkpoint(folder_with(tmp_path)).tensor("c")


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"w{i}": some(torch.float16, i + 1, 2) for i in range(7)}
    write_sharded(folder, tensors, 3)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(tensors)
    assert all(same(checkpoint.tensor(name), tensors[name]) for name in tensors)
    assert checkpoint.file("w1").name == "model-00002-of-00003.safetensors"


def test_real_models_agree_with_the_format_s_own_reader(shared: Path) -> None:
    from safetensors.torch import load_file

    for folder in sorted((shared / "models").iterdir()):
        checkpoint = open_checkpoint(folder)
        theirs: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            theirs |= load_file(file)
        assert set(checkpoint.names()) == set(theirs)
        assert all(torch.equal(checkpoint.tensor(name), theirs[name]) for name in theirs)


# ---------------------------------------------------------------- damage


def refused(folder: Path, match: str, file: str = "model.safetensors") -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(folder))
    assert file in str(caught.value)
    return str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    steps = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1]
    offsets = sorted({*steps, *range(3, len(whole), max(1, len(whole) // 20))})
    assert len(offsets) >= 20
    for offset in offsets:
        file.write_bytes(whole[:offset])
        refused(folder, "is empty" if offset == 0 else "cut off")
    file.write_bytes(whole)
    open_checkpoint(folder)


def test_bytes_left_over_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(folder, "1 bytes that belong to no tensor")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 1 << 31])
def test_an_absurd_header_length_is_refused(tmp_path: Path, length: int) -> None:
    folder = folder_with(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(folder, f"claims a header of {length} bytes")


def why_refused(folder: Path, expected: dict[str, tuple[int, ...]]) -> str | None:
    try:
        check_tensors(open_checkpoint(folder), expected, folder)
    except ConfigError as error:
        return str(error)
    return None


def test_no_flipped_bit_of_the_header_goes_unseen(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    expected = {name: tuple(tensor.shape) for name, tensor in SMALL.items()}
    seed = random.randrange(1 << 30)
    print("seed", seed)
    bits = random.Random(seed).sample(range(end * 8), 300)
    harmless = 0
    for bit in bits:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(data))
        reason = why_refused(folder, expected)
        if reason is None:  # a space that became another blank, or the like: nothing may differ
            harmless += 1
            checkpoint = open_checkpoint(folder)
            assert all(same(checkpoint.tensor(name), SMALL[name]) for name in SMALL), bit
        else:
            assert str(folder) in reason
    assert harmless < len(bits) // 10


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "size", "match"),
    [
        ({"a": entry(), "b": entry(offsets=[2, 6])}, 6, "overlaps the one before"),
        ({"a": entry(), "b": entry()}, 4, "overlaps the one before"),
        ({"a": entry(offsets=[4, 8])}, 8, "leaves a hole"),
        ({"a": entry(), "b": entry(offsets=[8, 12])}, 12, "leaves a hole"),
        ({"a": entry(offsets=[0, 4]), "b": entry(offsets=[4, 8])}, 4, "cut off"),
        ({"a": entry(offsets=[1 << 40, (1 << 40) + 4])}, 4, "leaves a hole"),
        ({"a": entry(offsets=[4, 0])}, 4, "no pair start <= end"),
        ({"a": entry(offsets=[-4, 0])}, 4, "no pair"),
        ({"a": entry(offsets=[0, 4.0])}, 4, "no pair"),
        ({"a": entry(offsets=[0])}, 4, "no pair"),
        ({"a": entry(offsets="04")}, 4, "no pair"),
        ({"a": entry(shape=[2])}, 4, "does not have the 4 bytes"),
        ({"a": entry(dtype="F16")}, 4, "does not have the 4 bytes"),
        ({"a": entry(shape=[1 << 59, 1 << 59])}, 4, "does not have the 4 bytes"),
        ({"a": entry(shape=[1 << 61])}, 4, "no list of at most 16 sizes"),
        ({"a": entry(shape=[-1])}, 4, "no list of at most 16 sizes"),
        ({"a": entry(shape=[True])}, 4, "no list of at most 16 sizes"),
        ({"a": entry(shape=[1] * 17)}, 4, "no list of at most 16 sizes"),
        ({"a": entry(shape="1")}, 4, "no list of at most 16 sizes"),
        ({"a": entry(dtype="F31")}, 4, "dtype 'F31'; readable are F64"),
        ({"a": entry(dtype=None)}, 4, "dtype 'None'"),  # type: ignore[arg-type]
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "needs exactly dtype"),
        ({"a": entry() | {"more": 1}}, 4, "needs exactly dtype"),
        ({"a": [1]}, 4, "needs exactly dtype"),
        ({"__metadata__": [], "a": entry()}, 4, "__metadata__"),
        ({"__metadata__": {"format": "pt"}}, 0, "holds no tensors"),
        (b'{"a": ' * 30_000, 4, "nested too deeply|not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", 4, "not valid JSON"),
        (b'{"a": "\xff"}', 4, "not valid JSON"),
        (b"[1, 2]", 4, "no JSON object"),
        (b'{"a": {}, "a": {}}', 4, "key 'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', 4, "key 'dtype' occurs twice"),
        (b"{", 4, "not valid JSON"),
    ],
)
def test_headers_that_cannot_be_true_are_refused(
    tmp_path: Path, header: object, size: int, match: str
) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(size))
    refused(tmp_path, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x02}q\x00X\x05\x00" + bytes(100), "pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
        (b"", "is empty"),
        (b"<html>", "cut off"),
        (b"<!DOCTYPE html><html>", "claims a header"),
    ],
)
def test_other_files_under_that_name_are_recognised(
    tmp_path: Path, content: bytes, match: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, match)


def test_a_header_of_640_bytes_is_no_pickle(tmp_path: Path) -> None:
    """Its length reads 80 02 00 ..., which is also how pickles begin."""
    text = json.dumps(header_of(SMALL)).encode().ljust(0x280)
    write_raw(tmp_path / "model.safetensors", text, b"".join(map(raw_bytes, SMALL.values())))
    assert same(open_checkpoint(tmp_path).tensor("a"), SMALL["a"])


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder not found"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(ConfigError, match="only pickled weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"to serve a GGUF file name the file itself, model\.gguf"
    ):
        open_checkpoint(tmp_path)
    write_safetensors(tmp_path / "other.safetensors", SMALL)
    with pytest.raises(ConfigError, match=r"has other\.safetensors but neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_sharded(folder, {f"w{i}": some(torch.float32, 2) for i in range(4)}, 2)
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / TWO).unlink()
    refused(sharded, "missing, although model.safetensors.index.json names it", TWO)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    refused(sharded, "cut off", TWO)


FOREIGN = ("../x", "/etc/x", "sub/x", "..\\x", "C:x", "a\0b", ".x", "")


@pytest.mark.parametrize(
    "name", [*(f"{name}.safetensors" for name in FOREIGN), "..", "", "x.bin", 3, None]
)
def test_an_index_may_only_name_files_beside_it(sharded: Path, name: object) -> None:
    edit_index(sharded, w0=name)
    refused(sharded, "a shard is a .safetensors file beside it", "index.json")


def test_a_link_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    shutil.move(sharded / TWO, tmp_path / TWO)
    os.symlink(tmp_path / TWO, sharded / TWO)
    refused(sharded, "a link that leads out of the model's folder", TWO)
    (sharded / TWO).unlink()
    os.symlink(sharded / "gone", sharded / TWO)
    refused(sharded, "a link to nothing", TWO)
    (sharded / TWO).unlink()
    shutil.move(tmp_path / TWO, sharded / "real")
    os.symlink("real", sharded / TWO)
    assert len(open_checkpoint(sharded).names()) == 4


def test_the_layout_of_the_hub_s_cache_is_allowed(tmp_path: Path) -> None:
    store = tmp_path / "models--someone--model"
    snapshot = store / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (store / "blobs").mkdir()
    write_safetensors(store / "blobs" / "0123", SMALL)
    os.symlink("../../blobs/0123", snapshot / "model.safetensors")
    assert same(open_checkpoint(snapshot).tensor("a"), SMALL["a"])


def test_a_tensor_listed_in_the_wrong_shard(sharded: Path) -> None:
    edit_index(sharded, w0=TWO)
    refused(sharded, f"lists tensor 'w0' in {TWO}, but it is in {ONE}", "index.json")
    edit_index(sharded, w0=ONE, ghost=ONE)
    refused(sharded, "'ghost' in .*, but it is in no shard", "index.json")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    tensors = {"w1": some(torch.float32, 2), "w3": some(torch.float32, 2), "w0": SMALL["a"]}
    write_safetensors(sharded / TWO, tensors)
    refused(sharded, f"'w0' is also in {ONE}", TWO)


def test_a_tensor_the_index_does_not_list_is_reported(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["w3"]
    path.write_text(json.dumps(index))
    assert "w3" not in open_checkpoint(sharded)
    assert "the index does not list num=1" in caplog.text


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {}}', "weight_map is missing, empty"),
        ('{"weight_map": []}', "weight_map is missing, empty"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "occurs twice"),
    ],
)
def test_a_broken_index(tmp_path: Path, content: str, match: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, match, "index.json")


# ---------------------------------------------------------------- what the weights are


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
def test_weights_that_are_no_numbers_are_refused_when_read(
    tmp_path: Path, bad: float, dtype: torch.dtype
) -> None:
    values = torch.zeros(4, 5)
    values[2, 3] = bad
    folder = folder_with(tmp_path, {"good": torch.ones(3), "w": values.to(dtype)})
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("good")
    checkpoint.slice("w", 0, 0, 2)
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor 'w' holds NaN or infinity"):
        checkpoint.tensor("w")
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor 'w' holds NaN or infinity"):
        checkpoint.slice("w", 0, 2, 1)
    open_checkpoint(folder, finite_only=False).tensor("w")


def test_nan_in_the_other_eight_bit_float() -> None:
    check_finite("w", torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="holds NaN"):
        check_finite("w", torch.tensor([float("nan")]).to(torch.float8_e4m3fn))


def test_integers_and_empty_tensors_are_always_finite() -> None:
    check_finite("w", torch.tensor([1 << 62]))
    check_finite("w", torch.empty(0))


SHAPES = {"a": (2, 3), "b": (4,)}


def opened(tmp_path: Path, **more: torch.Tensor) -> tuple[Checkpoint, Path]:
    folder = folder_with(tmp_path, SMALL | more)
    return open_checkpoint(folder), folder


def test_check_tensors_accepts_what_fits(tmp_path: Path) -> None:
    checkpoint, folder = opened(tmp_path, **{"m.rotary_emb.inv_freq": torch.ones(2)})
    check_tensors(checkpoint, SHAPES, folder)
    check_tensors(checkpoint, {"a": (2, 3)}, folder, optional={"b": (4,), "c": (1,)})


def test_check_tensors_names_what_does_not_fit(tmp_path: Path) -> None:
    checkpoint, folder = opened(tmp_path)
    with pytest.raises(ConfigError, match="lacks tensor 'c'"):
        check_tensors(checkpoint, SHAPES | {"c": (1,)}, folder)
    many = {f"layer.{i}": (1,) for i in range(9)}
    with pytest.raises(ConfigError, match=r"lacks tensors 'layer.0', .* and 6 more"):
        check_tensors(checkpoint, SHAPES | many, folder)
    with pytest.raises(ConfigError, match=r"'a' has shape \[2, 3\], but .* \[3, 2\]") as caught:
        check_tensors(checkpoint, SHAPES | {"a": (3, 2)}, folder)
    assert "model.safetensors" in str(caught.value)
    with pytest.raises(ConfigError, match="holds tensor 'b' that this architecture does not use"):
        check_tensors(checkpoint, {"a": (2, 3)}, folder)
    with pytest.raises(ConfigError, match="'b' has shape"):
        check_tensors(checkpoint, {"a": (2, 3)}, folder, optional={"b": (5,)})
