"""How is the text of a special token encoded when it must not count as one?

A mark (a character that no text needs) is put inside the written-out token. The search for
special tokens, which comes first, then does not see it; a normaliser removes the mark afterwards,
so that the words around it are encoded as if it had never been there.
"""

from __future__ import annotations

import tokenizers
from tokenizers import normalizers


class PlainEncoder:
    """A twin of a tokenizer, over the same vocabulary, that removes `mark` from texts."""

    def __init__(self, backend: tokenizers.Tokenizer, mark: str) -> None:
        twin = tokenizers.Tokenizer(backend.model)
        added = backend.get_added_tokens_decoder()
        for token_id in sorted(added):
            twin.add_tokens([_before_normaliser(added[token_id])])
        steps = [normalizers.Replace(mark, "")]
        if backend.normalizer is not None:
            steps.append(backend.normalizer)
        twin.normalizer = normalizers.Sequence(steps)
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
        self.backend = twin


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
