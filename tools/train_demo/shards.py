"""Where do training tokens come from? Worker processes that write numbered shards, each a function
of (seed, number) alone, so the data is the same however many workers there are. From number
`LATER_FROM` on they hold the later lessons, with tasks that the first did not have.

A shard is [sequences, length + 1] of uint16; the highest bit marks tokens to learn from (answers
and stories; not questions full of random numbers).
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools import worlds
from tools.train_demo.tokenizer import BEGIN, END, ROLE_IDS

SEQUENCES = 64
LENGTH = 2048
LEARN = 1 << 15
STORY_SHARE = 0.12  # of documents that are plain stories
BOOK_SHARE = 0.03  # ... that are pieces of the books given
BOOK_PIECE = 1200  # characters
LATER_FROM = 10_500  # the first shard of the later lessons
PATIENCE = 180.0  # seconds without the next shard (a second's work) before the run ends


def make_shard(
    number: int, seed: int, tokenizer: Tokenizer, books: list[str]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    rng = random.Random(f"{seed}/{number}")
    lessons = worlds.FIRST_LESSONS if number < LATER_FROM else worlds.LATER_LESSONS
    need = SEQUENCES * (LENGTH + 1)
    found: list[int] = []
    while len(found) < need:
        batch = [_pieces(rng, books, lessons) for _ in range(256)]
        texts = [text for pieces in batch for _, text, _ in pieces]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for pieces in batch:
            found.append(BEGIN)
            for role, _, learn in pieces:
                if role is not None:
                    found.append(ROLE_IDS[role])
                mark = LEARN if learn else 0
                found.extend(token | mark for token in next(encoded).ids)
                found.append(END | mark)
    return np.array(found[:need], np.uint16).reshape(SEQUENCES, LENGTH + 1)


def _pieces(
    rng: random.Random, books: list[str], lessons: Sequence[str]
) -> list[tuple[str | None, str, bool]]:
    """(role, text, learn) of one document."""
    kind = rng.random()
    if kind < BOOK_SHARE and books:
        book = rng.choice(books)
        start = rng.randrange(max(1, len(book) - BOOK_PIECE))
        return [(None, book[start : start + BOOK_PIECE], True)]
    if kind < BOOK_SHARE + STORY_SHARE:
        return [(None, worlds.document(rng, "train"), True)]
    conversation = worlds.training_conversation(rng, lessons)
    return [(m.role, m.content, m.role == "assistant") for m in conversation]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.npy"


def wait_for(
    folder: Path, number: int, check: Callable[[], None]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    """The shard, as soon as its worker has written it. `check` raises when that cannot happen;
    a worker that lives but writes nothing for `PATIENCE` seconds ends the run too."""
    path = shard_path(folder, number)
    start = time.monotonic()
    while not path.exists():
        check()
        if time.monotonic() - start > PATIENCE:
            raise SystemExit(f"no worker has written {path.name} in {PATIENCE:.0f} seconds")
        time.sleep(0.005)
    return np.load(path)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first shard")
    parser.add_argument("--shards", type=int, required=True, help="how many")
    parser.add_argument("--book", type=Path, action="append", default=[])
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    books = [path.read_text() for path in args.book]
    for number in range(args.first + args.worker, args.first + args.shards, args.workers):
        path = shard_path(args.folder, number)
        if path.exists():
            continue
        temporary = path.with_suffix(f".{args.worker}.tmp.npy")
        np.save(temporary, make_shard(number, args.seed, tokenizer, books))
        temporary.rename(path)


if __name__ == "__main__":
    main()
