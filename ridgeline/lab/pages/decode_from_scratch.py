"""How much of its memory's bandwidth does decoding reach on this machine, in several ways?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import msgspec

from ridgeline import demo
from ridgeline.figures import memory, number, percent, scaled, seconds
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

if TYPE_CHECKING:
    from ridgeline.measure.decode_ways import Way

WHERE = "ridgeline.measure.decode_ways."
MEASURED = 0.9  # of the work; the rest is the memory's bandwidth


class Inputs(msgspec.Struct, frozen=True):
    prompt: Annotated[int, control("prompt", ge=4, le=128, step=4, unit="tokens", scale="log")] = 32
    output: Annotated[int, control("answer", ge=4, le=48, step=1, unit="tokens")] = 16


class Ran(msgspec.Struct, frozen=True):
    """One way: seconds of the pass over the prompt, of each token after the first, and of the
    median one."""

    name: str
    does: str
    weight_bytes: int
    prompt_s: float
    token_s: list[float]
    typical_s: float
    bytes_per_s: float


class Drawing(msgspec.Struct, frozen=True):
    """`near`: bytes a second of reading a buffer as large as the weights, which may stay in the
    last cache; `far`: of a large one."""

    ways: list[Ran]
    near: float
    far: float
    prompt: int
    output: int


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    from ridgeline.measure.decode_ways import Way, bandwidths, decode_ways

    ways = list[Ran]()
    for told in decode_ways(demo.folder(), inputs.prompt, inputs.output):
        if isinstance(told, Way):
            ways.append(_ran(told))
        else:
            yield MEASURED * told
    yield MEASURED
    near, far = bandwidths(ways[-1].weight_bytes)
    drawing = Drawing(ways, near, far, inputs.prompt, inputs.output)
    yield Answer(
        _sentence(drawing),
        drawing,
        _figures(drawing),
        _tables(drawing),
        _questions(drawing),
        Guess(
            f"How many times faster is the engine than computing all {inputs.prompt} and more "
            "tokens again for each new one?",
            "times",
            float(f"{ways[0].typical_s / ways[-1].typical_s:.2g}"),
        ),
    )


def _ran(way: Way) -> Ran:
    return Ran(
        way.name, way.does, way.weight_bytes, way.prompt_s, list(way.token_s), way.typical_s,
        way.bytes_per_s,
    )  # fmt: skip


# ------------------------------------------------------------------------ in words


def _sentence(drawing: Drawing) -> str:
    naive, cached, last = drawing.ways[0], drawing.ways[1], drawing.ways[-1]
    share = percent(last.bytes_per_s / drawing.near, 0)
    return (
        f"On this machine the engine makes {number(1 / last.typical_s)} tokens a second and draws "
        f"{scaled(last.bytes_per_s, 'B/s')} of weights, {share} of what reading as many bytes "
        f"gives; with a cache in plain PyTorch it makes {number(1 / cached.typical_s)}, without "
        f"one {number(1 / naive.typical_s)}."
    )


def _figures(drawing: Drawing) -> list[Figure]:
    rows = [
        Figure(
            f"{way.name}: of weights", way.bytes_per_s, "B/s", "measured",
            f"{memory(way.weight_bytes)} x {number(1 / way.typical_s)} tok/s (median token "
            f"{seconds(way.typical_s)}; {way.does})", f"{WHERE}decode_ways",
        )
        for way in drawing.ways
    ]  # fmt: skip
    size = drawing.ways[-1].weight_bytes
    return [
        *rows,
        Figure(
            "Reading as many bytes", drawing.near, "B/s", "measured",
            f"the fastest pass over a buffer of {memory(size)}, which may stay in the last cache",
            f"{WHERE}bandwidths",
        ),
        Figure(
            "Reading a large buffer", drawing.far, "B/s", "measured",
            "the fastest pass over one that no cache holds", f"{WHERE}bandwidths",
        ),
    ]  # fmt: skip


def _tables(drawing: Drawing) -> list[Table]:
    every = zip_longest(*(way.token_s for way in drawing.ways))
    tokens: list[list[str | float]] = [
        [i + 2, *("" if one is None else one for one in row)] for i, row in enumerate(every)
    ]
    return [
        Table(
            "By way",
            ["way", "weights, B", "prompt, s", "median token, s", "tok/s", "B/s", "what it does"],
            [[way.name, way.weight_bytes, way.prompt_s, way.typical_s, 1 / way.typical_s,
              way.bytes_per_s, way.does] for way in drawing.ways],
        ),
        Table(
            "Each token, in seconds",
            ["token", *(way.name for way in drawing.ways)],
            tokens,
        ),
    ]  # fmt: skip


def _questions(drawing: Drawing) -> list[Question]:
    naive, cached, last = drawing.ways[0], drawing.ways[1], drawing.ways[-1]
    whole = last.prompt_s + sum(last.token_s)
    return [
        Question(
            "What does the KV cache save here?",
            f"A pass over all tokens takes {seconds(naive.typical_s)}, over the new one alone "
            f"{seconds(cached.typical_s)}: {number(naive.typical_s / cached.typical_s)} times "
            "less, and the more the longer the text is.",
        ),
        Question(
            "Why is a token of the prompt so much cheaper than one of the answer?",
            f"The engine reads {drawing.prompt} tokens in {seconds(last.prompt_s)}, "
            f"{seconds(last.prompt_s / drawing.prompt)} each, with one reading of the weights; a "
            f"token of the answer takes {seconds(last.typical_s)}. Of the whole answer the prompt "
            f"is {percent(last.prompt_s / whole, 0)}.",
        ),
        Question(
            "Could it be faster?",
            f"At {scaled(drawing.near, 'B/s')} the weights alone take "
            f"{seconds(last.weight_bytes / drawing.near)}, and a token takes "
            f"{seconds(last.typical_s)}. Fewer bits for each weight lower the floor; work that "
            "shares a reading, as drafts or more requests do, goes below it.",
        ),
    ]


PAGE = Page(
    name="decode_from_scratch",
    title="Decode from scratch",
    idea="Decoding is reading weights. How fast this machine reads them depends on how it is "
    "written.",
    group="Start here",
    inputs=Inputs,
    answer=answer,
    long=True,
    needs_model=True,
    presets=(
        Preset("A short answer", {}),
        Preset("A longer prompt", {"prompt": 128, "output": 8}),
    ),
)
