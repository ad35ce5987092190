"""Which beginnings of prompts does a replica hold? What a router can know without asking it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

PIECE_CHARACTERS = 256
NAME_BYTES = 16
ENTRY_BYTES = (
    256  # of a name in the table and among the sure ones: 190 measured, tables grow in leaps
)
SPARE_TOKENS = (
    64  # that a replica may find less: its blocks are rounded, the last token is computed
)

Names = tuple[bytes, ...]


def names_of(prompt: str, owner: bytes = b"") -> Names:
    """One name for each whole piece of the prompt: of all characters up to the end of the piece.
    Those of other owners differ, since their caches are apart."""
    names, name = [], blake2b(owner, digest_size=NAME_BYTES).digest()
    for start in range(0, len(prompt) - PIECE_CHARACTERS + 1, PIECE_CHARACTERS):
        piece = prompt[start : start + PIECE_CHARACTERS].encode("utf-8", "surrogatepass")
        name = blake2b(piece, digest_size=NAME_BYTES, key=name).digest()
        names.append(name)
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt on its way to a replica: its pieces, and when those were used last that it must
    hold, unless it has dropped them."""

    names: Names
    last_used: tuple[int, ...]


class Prefixes:
    """Of one replica, by least recent use, at most `max_bytes`.

    What was sent counts as held, so that equal beginnings follow each other; it is sure when an
    answer to it has begun. An answer that found less in the cache than was sure shows that the
    replica has dropped a piece, and with it all that was used no later: it drops by age too.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // ENTRY_BYTES
        self._used: OrderedDict[bytes, int] = OrderedDict()  # the number of the prompt
        self._sure: set[bytes] = set()
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._used)

    def held(self, names: Names) -> int:
        """How many leading pieces it is thought to hold."""
        return next((i for i, name in enumerate(names) if name not in self._used), len(names))

    def send(self, names: Names) -> Sent:
        """A prompt is on its way there. Its first piece is used last, so it is dropped last."""
        num_sure = next((i for i, name in enumerate(names) if name not in self._sure), len(names))
        sent = Sent(names, tuple(self._used[name] for name in names[:num_sure]))
        self._num_sent += 1
        for name in reversed(names[: self._most]):
            self._used[name] = self._num_sent
            self._used.move_to_end(name)
        while len(self._used) > self._most:
            self._drop_oldest()
        return sent

    def begun(self, sent: Sent) -> None:
        """Its answer has begun: the prompt has been read there."""
        self._sure.update(name for name in sent.names if name in self._used)

    def found(self, sent: Sent, num_pieces: int) -> None:
        """So many of its first pieces were in the cache."""
        if num_pieces >= len(sent.last_used):
            return
        lost = sent.last_used[num_pieces]
        while self._used and next(iter(self._used.values())) <= lost:
            self._drop_oldest()

    def clear(self) -> None:
        self._used.clear()
        self._sure.clear()

    def _drop_oldest(self) -> None:
        name, _ = self._used.popitem(last=False)
        self._sure.discard(name)


def pieces_found(num_characters: int, num_tokens: int, num_cached: int) -> int:
    """Of a prompt of so many characters and tokens, `num_cached` of which were in a cache."""
    share = min(1.0, (num_cached + SPARE_TOKENS) / max(1, num_tokens))
    return int(share * num_characters) // PIECE_CHARACTERS
