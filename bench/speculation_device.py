"""Is what a device does in a step with drafts priced as it is? Both times of real steps.

Each step, drafts and their check, is sent while the device is busy with something else, so the
time is the device's alone, however slow the host is. Beside it is what a calibration (`--record`)
says of the same step. Contexts are random tokens: how many of the drafts are right changes nothing
but by how much the context grows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bench.speculation_batches import OFF, options
from ridgeline.build import Built, build
from ridgeline.build_draft import draft_source
from ridgeline.config import EngineConfig
from ridgeline.costing import asked_drafts
from ridgeline.formats import MODEL
from ridgeline.measure.steps import StepBench, step_bench
from ridgeline.measure.stopwatch import typical
from ridgeline.speculation.price import drafter_of
from ridgeline.step import StepShape

Row = dict[str, Any]


def device(args: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of requests and drafts; first of an engine that never drafts."""
    for speculate in dict.fromkeys((OFF, args.speculate)):
        config = EngineConfig(model=args.model, speculate=speculate, **options(args))
        built = build(config)
        try:
            yield from rows_of(built, step_bench(built), speculate, args)
        finally:
            built.close()


def rows_of(
    built: Built, bench: StepBench, speculate: str, args: argparse.Namespace
) -> Iterator[Row]:
    if bench.timer is None:
        raise SystemExit("this device has no clock of its own; use a GPU")
    for batch in args.batches:
        for num_draft_tokens in [k for k in args.draft_tokens if k == 0 or speculate != OFF]:
            if batch * (num_draft_tokens + 1) > bench.most_alone:
                continue
            found: list[float] = []
            for _ in range(args.rounds):
                times = bench.alone(batch, args.prompt_len, num_draft_tokens, args.steps)
                found += times.seconds
            measured = typical(found) if found else None
            predicted = device_seconds(built, times.shape, num_draft_tokens)
            yield {
                "speculate": speculate,
                "batch": batch,
                "draft_tokens": num_draft_tokens,
                "context": round(sum(before for _, before in times.shape) / batch),
                "device_us": None if measured is None else measured * 1e6,
                "predicted_us": predicted * 1e6,
                "error": None if measured is None else predicted / measured - 1,
                "rounds": [seconds * 1e6 for seconds in found],
            }


def device_seconds(built: Built, shape: StepShape, num_draft_tokens: int) -> float:
    """The device's part of a step of this engine, drafts included, by its prices."""
    batch, pricer = len(shape), built.pricer
    seconds = pricer.cost(shape, batch * (num_draft_tokens + 1)).device_s
    asked = asked_drafts(built.resolved)
    if asked is None or not num_draft_tokens:
        return seconds
    draft = draft_source(asked.argument).spec if asked.line.argument == MODEL else None
    context = round(sum(before for _, before in shape) / batch)
    return seconds + drafter_of(pricer.setup, asked, draft).seconds(
        batch, context, num_draft_tokens
    )
