"""Are text files read, and bad ones refused by name?"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.evaluation import texts
from ridgeline.evaluation.texts import read_text


def test_plain_and_packed_files_give_the_same_text(tmp_path: Path) -> None:
    text = "A caf\u00e9.\nTwo lines.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.txt.gz") == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"", "no text"),
        (b" \n", "no text"),
        (b"ab\xff", r"not UTF-8 text \(byte 2\)"),
        (gzip.compress(b"some text", mtime=0)[:-6], "cannot be read"),
        (gzip.compress(b"some text" * 9, mtime=0)[:12] + b"\xff" * 20, "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.txt.*{reason}"):
        read_text(path)


def test_a_small_file_that_unpacks_to_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MAX_BYTES", 1000)
    (tmp_path / "big.gz").write_bytes(gzip.compress(b"a" * 1001))
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        read_text(tmp_path / "big.gz")
