"""GGUF metadata of every type is read, and no damaged file is read as something else."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.loader.gguf import GGUFTensor, read_gguf
from tests.loader.write import gguf, text

METADATA: dict[str, tuple[int, object]] = {
    "u8": (0, 200),
    "i8": (1, -5),
    "u16": (2, 60000),
    "i16": (3, -300),
    "u32": (4, 4_000_000_000),
    "i32": (5, -2_000_000_000),
    "f32": (6, 0.5),
    "flag": (7, True),
    "name": (8, "h\u00e9llo"),
    "u64": (10, 1 << 60),
    "i64": (11, -(1 << 60)),
    "f64": (12, 1e-300),
    "numbers": (9, (5, [1, -2, 3])),
    "words": (9, (8, ["a", "", "\u2581b"])),
    "nested": (9, (9, [(4, [1, 2]), (4, [])])),
}
TENSORS = (GGUFTensor("a.weight", (3, 4), 0, 0), GGUFTensor("b", (7,), 14, 64))


def test_every_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(METADATA, TENSORS))
    header = read_gguf(path)
    want = {key: content for key, (kind, content) in METADATA.items() if kind != 9}
    want |= {"numbers": [1, -2, 3], "words": ["a", "", "\u2581b"], "nested": [[1, 2], []]}
    assert header.metadata == want
    assert header.tensors == TENSORS
    assert header.version == 3
    assert header.data_start % 32 == 0
    assert 0 <= header.data_start - path.stat().st_size < 32


def test_the_alignment_is_the_file_s_own(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"general.alignment": (4, 128)}))
    assert read_gguf(path).data_start == 128
    path.write_bytes(gguf({"general.alignment": (4, 0)}))
    with pytest.raises(ConfigError, match=r"general\.alignment"):
        read_gguf(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = gguf(METADATA, TENSORS)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError) as caught:
            read_gguf(path)
        assert str(path) in str(caught.value)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "m.gguf"
    whole = gguf(METADATA, TENSORS)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            read_gguf(path)
        except ConfigError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no readable GGUF"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (gguf({}, version=1), "version 1"),
        (gguf({}, version=1 << 24), "version"),  # a big-endian file
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 16), "cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 17, 0), "cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "type 99"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 62),
            "an array of 4611686018427387904 elements",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 1 << 30),
            "dimensions",
        ),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=match):
        read_gguf(path)


def test_a_key_twice_and_arrays_without_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    twice = gguf({"a": (0, 1)})
    entry = twice[24:]
    path.write_bytes(twice[:16] + struct.pack("<Q", 2) + entry + entry)
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        read_gguf(path)
    deep: tuple[int, object] = (4, [1])
    for _ in range(5):
        deep = (9, [deep])
    path.write_bytes(gguf({"a": (9, deep)}))
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_gguf(path)


def test_absurd_amounts_of_metadata_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
    with path.open("wb") as file:  # sparse: no room is taken
        file.write(head + struct.pack("<IIQ", 9, 0, 1 << 23))
        file.truncate(1 << 24)
    with pytest.raises(ConfigError, match="arrays of more than 2097152 elements"):
        read_gguf(path)
    for kind in (struct.pack("<IQ", 8, 1 << 30), struct.pack("<IIQQ", 9, 8, 1, 1 << 30)):
        with path.open("wb") as file:
            file.write(head + kind)
            file.truncate(1 << 32)
        with pytest.raises(ConfigError, match="more than 67108864 bytes of metadata"):
            read_gguf(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_gguf(tmp_path / "m.gguf")
