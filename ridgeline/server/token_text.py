"""How is one token shown in a list of log-probabilities?"""

from __future__ import annotations

from ridgeline.text.tokenizer import Tokenizer


class TokenTexts:
    """The bytes and the text of each token id; both empty for a model without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # at most one entry per id of the vocabulary

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
