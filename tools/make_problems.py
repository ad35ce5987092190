"""Write the problems and texts that `ridgeline eval` and `ridgeline quantize` read.

    python -m tools.make_problems [FOLDER]

The seeds are fixed, so the files come out equal; FOLDER is `ridgeline/evaluation/data` by default.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path
from random import Random

import msgspec

from ridgeline.evaluation.problems import DATA, PROBLEMS_FILE, STORY, TEXT_FILES, Problem, Split
from tools import worlds

SEED = 0
NUM_PROBLEMS = 500  # of each task, and stories
NUM_TEXTS: dict[Split, int] = {"train": 1600, "test": 400}  # 240k and 56k tokens of demo:chat
STORY_SHARE = 0.2  # of the texts; the others are questions with their answers


def held_out(task: str) -> Iterator[Problem]:
    rng = Random(f"{SEED}:{task}")
    while True:
        yield worlds.problem(task, rng, "test")


def stories() -> Iterator[Problem]:
    rng = Random(f"{SEED}:documents")
    while True:
        yield Problem(STORY, (), worlds.document(rng, "test"))


def texts(split: Split) -> Iterator[Problem]:
    """Stories and conversations in turn, as chance has it."""
    rng = Random(f"calibration:{split}")
    while True:
        if rng.random() < STORY_SHARE:
            yield Problem(STORY, (), worlds.document(rng, split))
        else:
            yield worlds.problem(rng.choice(list(worlds.TASKS)), rng, split)


def problems(num: int) -> Iterator[Problem]:
    """So many of each task, then so many stories."""
    kinds = (*map(held_out, worlds.TASKS), stories())
    return chain.from_iterable(islice(kind, num) for kind in kinds)


def line(problem: Problem) -> bytes:
    """JSON without the fields that are empty by default."""
    always = ("task", "messages", "answer")
    names = [field.name for field in fields(problem)]
    values = {name: getattr(problem, name) for name in names}
    return msgspec.json.encode({n: v for n, v in values.items() if v or n in always})


def write(path: Path, made: Iterable[Problem]) -> None:
    data = b"\n".join(map(line, made)) + b"\n"
    path.write_bytes(gzip.compress(data, 9, mtime=0))


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else DATA
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / PROBLEMS_FILE, problems(NUM_PROBLEMS))
    for split, num in NUM_TEXTS.items():
        write(folder / TEXT_FILES[split], islice(texts(split), num))


if __name__ == "__main__":
    main()
