"""How does a pattern with choices in it become a sentence?

`{field}` is a field of the world, `<pool>` a random entry of a pool, `[a|b]` one of several
pieces (they nest), and `a~` an article that becomes `a` or `an`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random as Rng

from ridgeline.errors import check

Fields = Mapping[str, str]
Piece = Callable[[Rng, Fields], str]
Pools = Mapping[str, Sequence[str]]
MARKS = "{<[|]"
AN = ("a", "e", "i", "o", "u", "honest", "hour")
NOT_AN = ("uni", "use", "one")


def compiled(patterns: Iterable[str], pools: Pools) -> tuple[Piece, ...]:
    return tuple(compile_one(pattern, pools) for pattern in patterns)


def compile_one(pattern: str, pools: Pools) -> Piece:
    pieces, rest = sequence(pattern, pools)
    check(not rest, "a pattern closes a bracket that it did not open", pattern=pattern)
    return pieces


def sequence(text: str, pools: Pools) -> tuple[Piece, str]:
    """What `text` says up to an unopened `|` or `]`, and the rest from there on."""
    pieces: list[Piece] = []
    while text and text[0] not in "|]":
        if text[0] == "{":
            name, _, text = text[1:].partition("}")
            pieces.append(field(name))
        elif text[0] == "<":
            name, _, text = text[1:].partition(">")
            pieces.append(pick(tuple(pools[name])))
        elif text[0] == "[":
            piece, text = alternatives(text[1:], pools)
            pieces.append(piece)
        else:
            end = min((i for i in map(text.find, MARKS) if i >= 0), default=len(text))
            pieces.append(literal(text[:end]))
            text = text[end:]
    return (pieces[0] if len(pieces) == 1 else joined(tuple(pieces))), text


def alternatives(text: str, pools: Pools) -> tuple[Piece, str]:
    choices = []
    while True:
        piece, text = sequence(text, pools)
        choices.append(piece)
        check(bool(text), "a pattern does not close a bracket")
        mark, text = text[0], text[1:]
        if mark == "]":
            return one_of(tuple(choices)), text


def literal(text: str) -> Piece:
    return lambda rng, fields: text


def field(name: str) -> Piece:
    return lambda rng, fields: fields[name]


def pick(pool: tuple[str, ...]) -> Piece:
    return lambda rng, fields: rng.choice(pool)


def one_of(choices: tuple[Piece, ...]) -> Piece:
    return lambda rng, fields: rng.choice(choices)(rng, fields)


def joined(pieces: tuple[Piece, ...]) -> Piece:
    return lambda rng, fields: "".join([piece(rng, fields) for piece in pieces])


def with_articles(text: str) -> str:
    """`text` with every `a~` (or `A~`) made `a` or `an` by the word that follows."""
    first, *rest = text.split("~ ")
    return first + "".join([("n " if wants_an(piece) else " ") + piece for piece in rest])


def wants_an(text: str) -> bool:
    return text.startswith(AN) and not text.startswith(NOT_AN)


def sentence(text: str) -> str:
    """`text` with a capital at its start, behind a quotation mark if there is one."""
    at = 1 if text[:1] == '"' else 0
    return text[:at] + text[at : at + 1].upper() + text[at + 1 :]
