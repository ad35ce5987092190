"""Tokenizer files are read as Transformers reads them, and broken ones are named."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.text.gguf_vocab import load_gguf_tokenizer
from ridgeline.text.sentencepiece import (
    Algorithm,
    Piece,
    PieceKind,
    SentencePieceModel,
    build_sentencepiece,
    parse_sentencepiece,
    read_sentencepiece,
)
from ridgeline.text.tokenizer import (
    Tokenizer,
    TokenizerSettings,
    load_tokenizer,
    named_tokenizer,
)
from tests.loader.write import gguf
from tests.text.vocabularies import (
    SEPARATOR,
    conformance,
    folder_for,
    model_tokenizer,
    vocabulary,
    vocabulary_folder,
)

TEXTS = ("<s>hi</s> there", "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>x", "  a  b ", "")


def letters(**changes: Any) -> tokenizers.Tokenizer:
    """A byte-level vocabulary of single characters, with two special tokens and another one."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


# ---------------------------------------------------------------- agreement with Transformers


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "minimind-6400", "stories260K"])
def test_ids_and_texts_are_those_of_transformers(shared: Path, name: str) -> None:
    from transformers import AutoTokenizer

    if name == "stories260K":
        folder, ours = shared / "models" / name, model_tokenizer(name)
    else:
        folder, ours = folder_for(name, "tokenizer.json"), vocabulary(name, "tokenizer.json")
    theirs = AutoTokenizer.from_pretrained(str(folder))
    inputs = (vocabulary_folder() / "gpt2" / "ggml-vocab-gpt-2.gguf.inp").read_bytes().decode()
    texts = [*inputs.split(SEPARATOR), *(case["text"] for case in conformance("gpt2")), *TEXTS]
    assert len(texts) > 130
    for text in texts:
        for special in (True, False):
            want = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == want, text
            assert ours.decode(want, skip_special_tokens=special) == theirs.decode(
                want, skip_special_tokens=special
            )
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    assert {i for i in ours.added_tokens if ours.is_special(i)} == set(theirs.all_special_ids)


# ---------------------------------------------------------------- beginnings, ends, added tokens


def test_bos_comes_from_the_config_when_the_vocabulary_does_not_add_it(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    plain = loaded(write(tmp_path, letters(), **named))
    bos, eos = plain.bos_token_id, plain.eos_token_id
    assert (bos, eos) == (256, 257)
    body = plain.encode("ab", add_special_tokens=False)
    assert plain.encode("ab") == body
    added = loaded(write(tmp_path, letters(), **named, add_bos_token=True, add_eos_token=True))
    assert added.encode("ab") == [bos, *body, eos]
    assert added.encode("") == [bos, eos]
    assert added.encode("ab", add_special_tokens=False) == body


def test_bos_is_not_added_twice(tmp_path: Path) -> None:
    backend = letters()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = loaded(write(tmp_path, backend, bos_token="<s>", add_bos_token=True))
    assert tokenizer.encode("a")[:2] != [256, 256]
    assert tokenizer.encode("a")[0] == 256


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    backend = letters()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = loaded(write(tmp_path, backend))
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_special_tokens_may_stand_in_the_config_alone(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "[E]": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    write(
        tmp_path,
        backend,
        eos_token="[E]",
        bos_token="[not there]",
        added_tokens_decoder={
            "3": {"content": "[X]", "special": True},
            "4": {"content": "[Y]", "special": False},
        },
    )
    tokenizer = loaded(tmp_path)
    assert tokenizer.encode("ab[E][X]a[Y]") == [0, 1, 2, 3, 0, 4]
    assert tokenizer.decode([0, 2, 3, 4]) == "a[Y]"
    assert tokenizer.special_ids == {2, 3}
    assert tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == 5


def test_the_config_s_flags_of_an_added_token_count(tmp_path: Path) -> None:
    write(tmp_path, letters(), added_tokens_decoder={"258": {"content": "<tool>", "special": True}})
    assert loaded(tmp_path).is_special(258)


def test_tokens_of_an_old_added_tokens_file(tmp_path: Path, shared: Path) -> None:
    shutil.copy(shared / "models" / "stories260K" / "tokenizer.model", tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 512, "</s>": 77}')
    tokenizer = loaded(tmp_path)
    assert tokenizer.encode("a<|end|>")[-1] == 512
    assert tokenizer.piece_to_id("</s>") == 2
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 600}')
    with pytest.raises(ConfigError, match=r"added_tokens\.json: .* id 600, the vocabulary 512"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "listed", [[], {"x": {}}, {"5": {}}, {"5": "text"}, {"5": {"content": ""}}]
)
def test_a_broken_list_of_added_tokens(tmp_path: Path, listed: object) -> None:
    write(tmp_path, letters(), added_tokens_decoder=listed)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        load_tokenizer(tmp_path)


def test_an_added_token_whose_id_contradicts_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, letters(), added_tokens_decoder={"900": {"content": "[X]"}})
    with pytest.raises(ConfigError, match=r"added token '\[X\]' id 900, the vocabulary 259"):
        load_tokenizer(tmp_path)


def test_names_may_come_from_special_tokens_map(tmp_path: Path) -> None:
    write(tmp_path, letters())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert loaded(tmp_path).eos_token_id == 257


def test_pieces_and_ids(tmp_path: Path) -> None:
    tokenizer = loaded(write(tmp_path, letters()))
    assert tokenizer.id_to_piece(256) == "<s>"
    assert tokenizer.piece_to_id("<s>") == 256
    for unknown in (-1, 259, 1 << 40):
        assert tokenizer.id_to_piece(unknown) is None
        assert tokenizer.token_bytes(unknown) == b""
        assert tokenizer.decode([unknown]) == ""
    space = tokenizer.encode(" ")
    assert [tokenizer.token_bytes(i) for i in space] == [b" "]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("\u00e9\n"))) == "\u00e9\n".encode()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_not_unicode_is_the_request_s_fault(tmp_path: Path, text: str) -> None:
    with pytest.raises(RequestFault, match="not valid Unicode") as caught:
        loaded(write(tmp_path, letters())).encode(text)
    assert caught.value.code == "invalid_text"


# ---------------------------------------------------------------- files


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_that_was_asked_for_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "none.gguf").write_bytes(gguf({}, ()))
    for name, problem in (
        ("nowhere", "not found"),
        ("empty", "holds no tokenizer"),
        ("file", "is a file"),
        ("none.gguf", "holds no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=f"{problem}.*tokenizer.json") as caught:
            named_tokenizer(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="no name"):
        named_tokenizer("")
    with pytest.raises(ConfigError, match="cannot be read"):
        named_tokenizer("~nobody-of-this-name/x")
    (tmp_path / "empty" / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match="this vocabulary format is not read"):
        named_tokenizer(str(tmp_path / "empty"))
    write(tmp_path, letters())
    assert named_tokenizer(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named_tokenizer("~") == tmp_path


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json", "tiktoken.model", "vocab.txt"])
def test_other_vocabularies_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="this vocabulary format is not read") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "Nothing"}}', b"\xff\xfe", b"PK\3\4"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_vocabulary_names_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError,
        match=r"is empty|is no tokenizer|not valid JSON|a JSON list|is no SentencePiece",
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_a_broken_config_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, letters())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_file_cut_anywhere_is_refused_or_shorter(shared: Path) -> None:
    data = (shared / "models" / "babyllama-char105" / "tokenizer.model").read_bytes()
    whole = parse_sentencepiece(data)
    for length in range(0, len(data), 7):
        try:
            part = parse_sentencepiece(data[:length])
        except (ValueError, IndexError):
            continue  # a cut between two pieces cannot be told from a smaller vocabulary
        assert part.pieces == whole.pieces[: len(part.pieces)]


def test_random_damage_to_a_sentencepiece_file_is_a_config_error(
    shared: Path, tmp_path: Path
) -> None:
    data = (shared / "models" / "babyllama-char105" / "tokenizer.model").read_bytes()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(bytes(damaged))
        try:
            read_sentencepiece(tmp_path / "tokenizer.model")
        except ConfigError:
            refused += 1
    assert refused > 50


# ---------------------------------------------------------------- SentencePiece rules


def unigram(**changes: Any) -> SentencePieceModel:
    words = {"\u2581": -3.0, "a": -2.0, "b": -2.0, "ab": -1.0, "\u2581ab": -1.5, "\u00e9": -2.0}
    pieces = (
        Piece("<unk>", 0.0, PieceKind.UNKNOWN),
        Piece("<s>", 0.0, PieceKind.CONTROL),
        Piece("</s>", 0.0, PieceKind.CONTROL),
        *(Piece(text, score, PieceKind.NORMAL) for text, score in words.items()),
    )
    values: dict[str, Any] = {"pieces": pieces, "algorithm": Algorithm.UNIGRAM}
    return SentencePieceModel(**(values | changes))


def pieces_of(model: SentencePieceModel, text: str) -> list[str]:
    backend = build_sentencepiece(model)
    return list(backend.encode(text, add_special_tokens=False).tokens)


def test_unigram_models_take_the_likeliest_cut() -> None:
    assert pieces_of(unigram(), "ab ab") == ["\u2581ab", "\u2581ab"]
    assert pieces_of(unigram(), "aab") == ["\u2581", "a", "ab"]


def test_whitespace_follows_the_model_s_own_rules() -> None:
    collapse = unigram()
    keep = unigram(remove_extra_whitespaces=False)
    bare = unigram(add_dummy_prefix=False)
    assert pieces_of(collapse, "  ab   ab ") == ["\u2581ab", "\u2581ab"]
    assert pieces_of(keep, " ab ") == ["\u2581", "\u2581ab", "\u2581"]
    assert pieces_of(bare, "ab") == ["ab"]
    assert pieces_of(collapse, "   ") == []
    assert pieces_of(keep, "") == []


def test_decoding_takes_the_dummy_prefix_back() -> None:
    settings = TokenizerSettings({})
    with_prefix = Tokenizer(build_sentencepiece(unigram()), settings)
    without = Tokenizer(build_sentencepiece(unigram(add_dummy_prefix=False)), settings)
    assert with_prefix.decode(with_prefix.encode("ab ab")) == "ab ab"
    assert without.decode(without.encode("ab ab")) == "ab ab"
    assert without.decode(with_prefix.encode("ab ab")) == " ab ab"


def test_characters_are_split_by_char_models() -> None:
    chars = unigram(algorithm=Algorithm.CHAR)
    assert pieces_of(chars, "ab") == ["\u2581", "a", "b"]


def test_word_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="type WORD"):
        build_sentencepiece(unigram(algorithm=Algorithm.WORD))


@pytest.mark.parametrize("name", ["stories260K", "babyllama-char105"])
def test_ids_are_those_of_sentencepiece_itself(shared: Path, tmp_path: Path, name: str) -> None:
    from sentencepiece import SentencePieceProcessor

    source = shared / "models" / name / "tokenizer.model"
    theirs = SentencePieceProcessor(model_file=str(source))
    shutil.copy(source, tmp_path)
    ours = loaded(tmp_path)
    inputs = (vocabulary_folder() / "gpt2" / "ggml-vocab-gpt-2.gguf.inp").read_bytes().decode()
    texts = [*inputs.split(SEPARATOR), *(case["text"] for case in conformance("gpt2"))]
    for text in texts:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
    assert ours.bos_token_id == theirs.bos_id()
    assert ours.encode("x")[0] == theirs.bos_id()


def test_a_unigram_file_is_read_as_sentencepiece_trained_it(tmp_path: Path, shared: Path) -> None:
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    lines = (shared / "data" / "books" / "alice_in_wonderland.txt").read_text().splitlines()[:400]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=800,
        model_type="unigram",
        minloglevel=2,
        num_threads=1,
        user_defined_symbols=["<sep>"],
        byte_fallback=True,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    theirs, ours = SentencePieceProcessor(model_proto=model.getvalue()), loaded(tmp_path)
    for text in lines[:200]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert theirs.piece_to_id("<sep>") in ours.encode("a<sep>b")


# ---------------------------------------------------------------- GGUF vocabularies


def ggml(**keys: tuple[int, object]) -> bytes:
    base: dict[str, tuple[int, object]] = {
        "model": (8, "gpt2"),
        "tokens": (9, (8, ["a", "b", "ab", "<e>"])),
        "token_type": (9, (5, [1, 1, 1, 3])),
        "merges": (9, (8, ["a b"])),
        "eos_token_id": (4, 3),
    }
    return gguf({f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()})


def test_a_small_gguf_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(ggml())
    tokenizer = load_gguf_tokenizer(path)
    assert tokenizer.encode("abba<e>") == [2, 1, 0, 3]
    assert tokenizer.eos_token_id == 3
    assert tokenizer.is_special(3)


def test_a_gguf_vocabulary_is_found_like_a_folder_s(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(ggml())
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.encode("abba<e>") == [2, 1, 0, 3]
    for none in ({}, {"tokenizer.ggml.model": (8, "no_vocab")}):
        path.write_bytes(gguf(none))
        assert load_tokenizer(path) is None


def test_llama_3_takes_whole_words_and_begins_every_text(tmp_path: Path) -> None:
    """Its tokenizer.json says ignore_merges, of which a GGUF file has nothing but the rule's name;
    "abc" cannot be merged here."""
    path = tmp_path / "v.gguf"
    tokens: tuple[int, object] = (9, (8, ["a", "b", "c", "abc", "ab", "<e>"]))
    kinds: tuple[int, object] = (9, (5, [1, 1, 1, 1, 1, 3]))
    keys = {"tokens": tokens, "token_type": kinds, "bos_token_id": (4, 5)}
    for pre, want in (("gpt-2", [4, 2]), ("llama-bpe", [5, 3])):
        path.write_bytes(ggml(**keys, pre=(8, pre)))
        assert load_gguf_tokenizer(path).encode("abc") == want
    path.write_bytes(ggml(**keys, pre=(8, "llama-bpe"), add_bos_token=(7, False)))
    assert load_gguf_tokenizer(path).encode("abc") == [3]


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"model": (8, "bert")}, "kind 'bert'; readable are llama and gpt2"),
        ({"tokens": (4, 1)}, r"tokenizer\.ggml\.tokens is missing or no list"),
        ({"tokens": (9, (8, ["a", "a", "b", "c"]))}, "holds a token twice"),
        ({"token_type": (9, (5, [1]))}, "token_type does not fit"),
        ({"token_type": (9, (5, [1, 1, 1, 77]))}, "token_type does not fit"),
        ({"merges": (9, (8, ["a c"]))}, "joins 'a c'"),
        ({"pre": (8, "martian")}, "cuts texts by rule 'martian'"),
        ({"model": (8, "llama")}, r"tokenizer\.ggml\.scores is missing"),
        ({"model": (8, "llama"), "scores": (9, (6, [0.5]))}, "scores does not fit"),
    ],
)
def test_broken_gguf_vocabularies(
    tmp_path: Path, keys: dict[str, tuple[int, object]], match: str
) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(ggml(**keys))
    with pytest.raises(ConfigError, match=match):
        load_gguf_tokenizer(path)


def test_protobuf_fields_that_do_not_fit_are_refused() -> None:
    piece = b"\x0a\x01a" + b"\x15" + struct.pack("<f", 1.0)
    good = b"\x0a" + bytes([len(piece)]) + piece
    assert parse_sentencepiece(good).pieces == (Piece("a", 1.0, PieceKind.NORMAL),)
    for bad in (b"\x0a\xff\xff\xff\xff\x0f", b"\x0b", b"\x08\x01\x0a", b"\x80" * 20, b"\x08\x01"):
        with pytest.raises((ValueError, IndexError)):
            parse_sentencepiece(bad)
