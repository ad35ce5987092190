"""Are text files read, and bad ones refused? Is there bundled text enough, the same each time?"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ridgeline import demo
from ridgeline.errors import ConfigError
from ridgeline.evaluation import texts
from ridgeline.evaluation.problems import Split
from ridgeline.evaluation.texts import Marked, bundled_tokens, read_text, text_tokens
from ridgeline.text.chat import load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_model import make_tiny_model


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


def tokenizer_of(folder: Path) -> Tokenizer:
    found = load_tokenizer(folder)
    assert found is not None
    return found


def demo_tokens(split: Split, num: int) -> Marked:
    folder = demo.folder("chat")
    tokenizer = tokenizer_of(folder)
    return bundled_tokens(tokenizer, load_chat_template(folder, tokenizer), split, num)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_bundled_text_is_long_enough_and_always_the_same(split: Split) -> None:
    found = demo_tokens(split, 3000)
    assert len(found.token_ids) == len(found.is_scored) >= 3000
    assert found == demo_tokens(split, 3000)
    assert demo_tokens(split, 6000).token_ids[:3000] == found.token_ids[:3000]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bundled text has \d+ tokens .* than the 1000000 of"):
        demo_tokens("test", 1_000_000)


def test_the_splits_differ() -> None:
    assert demo_tokens("train", 1000).token_ids[:1000] != demo_tokens("test", 1000).token_ids[:1000]


def test_answers_and_stories_are_scored_and_questions_are_not() -> None:
    tokenizer = tokenizer_of(demo.folder("chat"))
    found = demo_tokens("test", 4000)
    given = [i for i, s in zip(found.token_ids, found.is_scored, strict=True) if not s]
    scored = [i for i, s in zip(found.token_ids, found.is_scored, strict=True) if s]
    end, user = tokenizer.eos_token_id, tokenizer.piece_to_id("<|user|>")
    assert user in given
    assert user not in scored
    assert scored.count(end or -1) >= 10
    assert tokenizer.bos_token_id not in scored
    assert 0.3 < len(scored) / len(found.token_ids) < 0.9


def test_a_model_without_chat_gets_stories_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", chat_template=False, weights=False)
    tokenizer = tokenizer_of(folder)
    found = bundled_tokens(tokenizer, None, "train", 4000)
    assert found.token_ids[0] == tokenizer.bos_token_id == 1
    second = found.token_ids.index(1, 1)
    assert found.token_ids[second - 1] == tokenizer.eos_token_id
    assert found.is_scored[:3] == (False, True, True)


def test_a_text_is_scored_as_it_is(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_tiny_model(tmp_path / "m", weights=False))
    found = text_tokens(tokenizer, "Tom sat.")
    assert tokenizer.decode(found.token_ids) == "Tom sat."
    assert found.is_scored == (True,) * len(found.token_ids)
