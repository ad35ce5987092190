"""How is one token shown in a list of log-probabilities?"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from ridgeline.text.vocabulary import Vocabulary


class TokenTexts:
    """The bytes and the text of each token id; both empty for a model without a tokenizer."""

    def __init__(self, tokenizer: Vocabulary | None) -> None:
        self._tokenizer = tokenizer
        # At most one entry per id of the vocabulary, each.
        self._texts: dict[int, str] = {}
        self._names: dict[int, str] = {}

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        """Bytes that are no whole characters are shown as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.bytes_of(token_id).decode("utf-8", "replace")
        return text

    def name_of(self, token_id: int) -> str:
        """Its text, or its bytes where they are no whole characters: tokens that differ there would
        all be U+FFFD, and rows of them are known by their names."""
        name = self._names.get(token_id)
        if name is None:
            raw = self.bytes_of(token_id)
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._names[token_id] = name
        return name

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.is_special(token_id)


class Places:
    """Where in a text each of its tokens begins, in characters: one that several tokens make
    together begins with the first of them, and special tokens may be hidden."""

    def __init__(self, texts: TokenTexts, start: int = 0, *, hides_special: bool = False) -> None:
        self._texts = texts
        self._at = start
        self._hides_special = hides_special
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def begin_of(self, token_id: int) -> int:
        """Of the next token."""
        at = self._at
        if not (self._hides_special and self._texts.is_special(token_id)):
            self._at += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return at

    @property
    def end(self) -> int:
        """Of all so far, a character that is not whole included."""
        return self._at + len(self._decoder.decode(b"", final=True))


def places_of_prompt(texts: TokenTexts, token_ids: Sequence[int], shown: str) -> list[int]:
    """Where each token of a prompt begins in the text that is `shown` of it. What its tokens have
    before that (a token that begins every text, a space that was put there) begins with it."""
    places = Places(texts)
    begins = [places.begin_of(token_id) for token_id in token_ids]
    hidden = max(0, places.end - len(shown))
    return [max(0, begin - hidden) for begin in begins]
