"""How does text become token ids, and ids text again?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import normalizers

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.loader.folder import read_bytes, read_optional, refuse
from ridgeline.loader.gguf import is_gguf
from ridgeline.registry import load
from ridgeline.text.pieces import Pieces, read_rule
from ridgeline.text.sentencepiece import build_sentencepiece, read_sentencepiece
from ridgeline.text.tokenizer_file import MAX_BYTES, MAX_ID, check_added, check_tokenizer_json
from ridgeline.text.vocabulary import Vocabulary

# By name, because these readers build a Tokenizer themselves.
OTHER_READERS = {"gguf": "ridgeline.text.gguf_vocab:find_gguf_tokenizer"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What stands beside the vocabulary: which tokens have a role, and what every text gets.

    `named` maps a role (bos_token, eos_token, ...) to the token's text.
    """

    named: Mapping[str, str]
    add_bos: bool = False
    add_eos: bool = False


class Tokenizer(Vocabulary):
    """A vocabulary and its rules, over one object of the `tokenizers` package.

    Safe to use from several threads once made.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()  # some files ask for it; a prompt must never be cut in silence
        backend.no_padding()
        self._backend = backend
        self.named_tokens = settings.named
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {i: added[i].content for i in sorted(added)}
        self.vocab_size = _num_ids(backend)
        self._prefix, self._suffix = self._missing_ends(settings)
        rule = read_rule(backend.decoder)
        super().__init__(
            None if rule is None else Pieces(rule, self.id_to_piece, frozenset(added)),
            frozenset(i for i, token in added.items() if token.special),
        )
        # May take any time, for every token that is shown.
        self.decodes_by_regex = rule is None and '"Regex"' in _state(backend.decoder)
        self._plain: PlainEncoder | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, in which written-out special tokens count as such.

        `add_special_tokens` puts the beginning (or end) token around it where the model wants
        one. RequestFault when the text is not valid Unicode.
        """
        ids = self._ids(self._backend, text, add_special_tokens)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of `text`, where a special token with `mark` inside is plain text, sans the mark."""
        if self._plain is None:
            self._plain = PlainEncoder(self._backend, mark)
        return self._ids(self._plain.backend, text, add_special_tokens=False)

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that has none."""
        if not 0 <= token_id < self.vocab_size:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def piece_to_id(self, piece: str) -> int | None:
        found: int | None = self._backend.token_to_id(piece)
        return found

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # The batch call gives up Python's lock while it works, the single one keeps it: a long
            # prompt would stop every other thread of a server.
            (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
        except TypeError:
            raise RequestFault(
                "the text is not valid Unicode (a lone surrogate?)", code="invalid_text"
            ) from None
        except BaseException as fault:
            raise _failure(fault, "the model's tokenizer failed on this text") from fault
        return ids

    def decode_whole(self, token_ids: list[int]) -> str:
        try:
            text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        except BaseException as fault:
            raise _failure(fault, "the model's tokenizer failed on these tokens") from fault
        return text

    def _named_id(self, role: str) -> int | None:
        token = self.named_tokens.get(role)
        return None if token is None else self.piece_to_id(token)

    def _missing_ends(self, settings: TokenizerSettings) -> tuple[list[int], list[int]]:
        """The ids to put around a text that the vocabulary's own post-processor does not put."""
        ends = self._ids(self._backend, "", add_special_tokens=True)
        bos, eos = self.bos_token_id, self.eos_token_id
        prefix = [bos] if settings.add_bos and bos is not None and ends[:1] != [bos] else []
        suffix = [eos] if settings.add_eos and eos is not None and ends[-1:] != [eos] else []
        return prefix, suffix


def _state(decoder: object) -> str:
    return "" if decoder is None else decoder.__getstate__().decode()  # type: ignore[attr-defined]


def _failure(fault: BaseException, what: str) -> BaseException:
    """A panic of the package is no Exception; here it is a fault like others, and their cause."""
    return fault if isinstance(fault, (KeyboardInterrupt, SystemExit)) else RequestFault(what)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder or a GGUF file; None when it has none.

    Reads tokenizer.json, else tokenizer.model (SentencePiece), with tokenizer_config.json beside
    it. ConfigError names the file and what is wrong with it.
    """
    if is_gguf(folder):
        found: Tokenizer | None = load(OTHER_READERS, "gguf", "tokenizer reader")(folder)
        return found
    config = read_optional(folder / "tokenizer_config.json")
    named = read_optional(folder / "special_tokens_map.json") | config
    if os.path.lexists(folder / "tokenizer.json"):
        backend = _read_tokenizer_json(folder / "tokenizer.json")
        settings = _settings(named, config.get("add_bos_token") is True)
    elif os.path.lexists(folder / "tokenizer.model"):
        model = read_sentencepiece(folder / "tokenizer.model")
        try:
            backend = build_sentencepiece(model)
        except ConfigError as error:  # it knows no file
            refuse(folder / "tokenizer.model", str(error))
        named = model.named_tokens() | named
        settings = _settings(named, config.get("add_bos_token", True) is True)
    else:
        _refuse_other_kinds(folder)
        return None
    _add_tokens(backend, folder, config, settings)
    return Tokenizer(backend, settings)


def named_tokenizer(name: str) -> Path:
    """The folder or GGUF file whose tokenizer was asked for by `name`. ConfigError when there is
    none: neither the model's own nor a model that takes only ids may come in its place."""
    try:
        path = Path(name).expanduser()
        problem = _why_no_tokenizer(path) if name else "no name"
    except (OSError, RuntimeError) as error:  # no right to look; ~ of a user who is not there
        problem = f"cannot be read ({error})"
    if problem:
        raise ConfigError(
            f"tokenizer {name!r}: {problem}; name a folder with tokenizer.json or tokenizer.model, "
            "or a GGUF file, or leave it out for the model's own"
        )
    return path


def _why_no_tokenizer(path: Path) -> str:
    """In words; "" where there is one. ConfigError for one of a kind that is not read."""
    if is_gguf(path):
        return "" if load_tokenizer(path) is not None else "holds no tokenizer"
    if not path.exists():
        return "not found"
    if not path.is_dir():
        return "is a file"
    if any((path / file).exists() for file in TOKENIZER_FILES):
        return ""
    _refuse_other_kinds(path)
    return "holds no tokenizer"


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    data = read_bytes(path, MAX_BYTES)
    check_tokenizer_json(data, path)
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a bare Exception, or a panic, which is none
        refuse(path, f"is no tokenizer ({str(error)[:200]})")


def _num_ids(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id. As many as there are tokens, unless ids are left out; to look
    is much faster than a dict of all."""
    number: int = backend.get_vocab_size(with_added_tokens=True)
    if None not in map(backend.id_to_token, range(number)):
        return number
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _refuse_other_kinds(folder: Path) -> None:
    for name in ("vocab.json", "tekken.json", "tiktoken.model", "vocab.txt"):
        if (folder / name).exists():
            refuse(
                folder / name,
                "this vocabulary format is not read; the folder needs tokenizer.json or "
                "tokenizer.model (name another folder that has one with --tokenizer)",
            )


def _settings(config: Mapping[str, object], add_bos: bool) -> TokenizerSettings:
    named = {role: _content(config.get(role)) for role in NAMED_TOKENS}
    return TokenizerSettings(
        {role: token for role, token in named.items() if token is not None},
        add_bos,
        config.get("add_eos_token") is True,
    )


def _content(token: object) -> str | None:
    """A token in tokenizer_config.json is its text, or an object with its text in `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, object],
    settings: TokenizerSettings,
) -> None:
    """Tell the backend of the added and special tokens that only tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    there = backend.get_added_tokens_decoder()
    for token_id, token in _listed_tokens(path, config):
        if there.get(token_id) != token:
            _add_token(backend, path, token_id, token)
    path = folder / "added_tokens.json"  # how it was written before tokenizer_config.json had it
    older = read_optional(path)
    check_added(path, "this file", list(older))
    for text, number in older.items():
        if isinstance(number, int) and backend.token_to_id(text) is None:
            _add_token(backend, path, number, tokenizers.AddedToken(text, normalized=False))
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("additional_special_tokens")
    more = [_content(token) for token in extra] if isinstance(extra, list) else []
    path = folder / "tokenizer_config.json"
    check_added(path, "additional_special_tokens", [one for one in more if one is not None])
    for content in [*settings.named.values(), *more]:
        if content and content not in present and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])


def _add_token(
    backend: tokenizers.Tokenizer, path: Path, token_id: int, token: tokenizers.AddedToken
) -> None:
    known = backend.token_to_id(token.content)
    if known is None or known == token_id:
        backend.add_tokens([token])
        known = backend.token_to_id(token.content)
    if known != token_id:
        refuse(
            path, f"gives added token {token.content[:80]!r} id {token_id}, the vocabulary {known}"
        )


def _listed_tokens(
    path: Path, config: Mapping[str, object]
) -> list[tuple[int, tokenizers.AddedToken]]:
    """`added_tokens_decoder` by id."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping) or not all(map(_is_id, listed)):
        refuse(path, "added_tokens_decoder does not map token ids to tokens")
    found = [(int(key), _added_token(path, value)) for key, value in listed.items()]
    check_added(path, "added_tokens_decoder", [token.content for _, token in found])
    return sorted(found, key=lambda pair: pair[0])


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) <= len(str(MAX_ID)) and int(key) <= MAX_ID


def _added_token(path: Path, value: object) -> tokenizers.AddedToken:
    content = _content(value)
    if not content or not isinstance(value, Mapping):
        refuse(path, "added_tokens_decoder holds a token without content")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(content, **{f: bool(value[f]) for f in flags if f in value})


class PlainEncoder:
    """A twin of a tokenizer, over the same vocabulary, that removes `mark` from texts."""

    def __init__(self, backend: tokenizers.Tokenizer, mark: str) -> None:
        second = tokenizers.Tokenizer(backend.model)
        added = backend.get_added_tokens_decoder()
        for token_id in sorted(added):
            second.add_tokens([_before_normaliser(added[token_id])])
        steps = [normalizers.Replace(mark, "")]
        if backend.normalizer is not None:
            steps.append(backend.normalizer)
        second.normalizer = normalizers.Sequence(steps)
        if backend.pre_tokenizer is not None:
            second.pre_tokenizer = backend.pre_tokenizer
        self.backend = second


def _before_normaliser(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """The same token, looked for only before the normaliser takes the marks away."""
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )
