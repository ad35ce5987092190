"""config.json is read strictly, and every way to break it is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.loader import read_config, read_generation_config


def test_a_config_comes_back_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "x": [1, Infinity]}')
    assert read_config(tmp_path) == {"model_type": "llama", "x": [1, float("inf")]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a JSON list, not an object"),
        (b'"text"', "holds a JSON str"),
        (b"null", "holds a JSON NoneType"),
        (b'{"a": 1, "a": 2}', "key 'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 1}}', "key 'b' occurs twice"),
        (b'\xff\xfe{"a": 1}', "not valid JSON"),
        (b"[" * 200_000, "nested too deeply|not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_broken_config_names_the_file(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=match) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: no room is taken
    with pytest.raises(ConfigError, match="at most"):
        read_config(tmp_path)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder not found"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"missing; a model folder needs config\.json"):
        read_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"to serve a GGUF file name the file itself, .*model\.gguf"
    ):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.gguf: is no readable GGUF file \(cut off"):
        read_config(tmp_path / "model.gguf")
    (tmp_path / "weights.bin").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"is a file; give the folder with config\.json"):
        read_config(tmp_path / "weights.bin")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        read_config(tmp_path)


def test_generation_config_is_optional_but_strict(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)
