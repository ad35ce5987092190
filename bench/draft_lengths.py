"""What does the engine's choice of the draft length bring, on simulated machines, cell by cell?

No device: rows whose draft tokens are right with a known chance, steps of the prices of an 8B
shape on an H200, and an engine whose host takes most of a step. Each cell is tokens a second with
the controller's k, beside those with the best fixed k; `--against FILE` compares with the cells
of another version of the controller. Each choice takes the host CHOICE_S. Run it before and after a
change of the controller: python -m bench.draft_lengths --output cells.json
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.step import ScheduledRequest, StepPlan, StepResult
from tests.speculation import hosted
from tests.speculation.drafted import AT_HAND, DRAFTED, MAX_TOKENS
from tests.speculation.hosted import MICRO, Flat, Hosted, Machine, Text
from tests.speculation.test_controller import TooCheap, World, busy_host, ran
from tests.speculation.test_controller_in_flight import (
    COPIES,
    DEVICE_BOUND,
    HOST_BOUND,
    SELDOM_GOOD,
    SOME,
    STORIES,
)

CHOICE_S = 100 * MICRO
FIXED = (0, 1, 2, 3, 4, 6, 8)
SEEDS = range(3)
CONTEXT = 1000

Cell = Callable[[int, "int | None"], float]  # tokens a second, by seed and fixed k


class Counted(DraftLengthController):
    num_chosen = 0

    def _best(self, *args: object) -> int:
        self.num_chosen += 1
        return super()._best(*args)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- rows that come and go


@dataclass(slots=True)
class Rows(World):
    """Each answer has a chance of its own, and most of them another one in their second half."""

    rates: Sequence[float] = (0.5,)
    length: int = 200
    chances: dict[str, tuple[float, float]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    num_begun: dict[int, int] = field(default_factory=dict)

    def step(self, number: int, k: int) -> dict[str, tuple[int, int]]:
        verified = {}
        self.ended = []
        for place, row in enumerate(self.rows):
            name = row.request_id
            turn = self.num_begun.get(place, self.seed)
            if name not in self.chances:
                # The same answers in turn, whatever k is chosen: else luck would be most of it.
                turn, self.num_begun[place] = turn + 1, turn + 1
                rates, num = self.rates, len(self.rates)
                first, other = rates[(place + turn) % num], rates[(place + turn // num) % num]
                self.chances[name] = first, other
                self.done[name] = 0
            chance = self.chances[name][self.done[name] > self.length // 2]
            right = min(k, int(math.log(1 - self.rng.random()) / math.log(chance)))
            verified[name] = k, right
            self.num_tokens += right + 1
            self.done[name] += right + 1
            if self.done[name] >= self.length:
                self.rows[place] = new = Request(
                    f"{place} {self.num_begun[place]}",
                    (1,),
                    SamplingParams(max_tokens=1 << 20),
                    0.0,
                )
                new.num_computed_tokens = CONTEXT
                self.ended.append(name)
        self.last_s = self.takes(k) + (self.catching_up_s if k and self.is_behind else 0.0)
        self.last_s /= self.speed(self.seconds)
        self.is_behind = not k
        self.seconds += self.last_s
        self.by_drafts[k] = self.by_drafts.get(k, 0) + 1
        return verified

    def plan(self, k: int) -> StepPlan:
        return StepPlan(
            1,
            tuple(
                ScheduledRequest(row.request_id, CONTEXT, k + 1, (), samples=True, num_draft=k)
                for row in self.rows
            ),
        )


def rows_cell(
    make: Callable[[int], World], num_steps: int, has_cache: bool, seed: int, k: int | None
) -> float:
    world = make(seed)
    if k is not None:
        return world.run(num_steps, k)
    chooser = Counted(
        world.prices.seconds,
        acceptance=0.7,
        max_drafts=8,
        max_verified_tokens=MAX_TOKENS,
        has_cache=has_cache,
    )
    catching_up_s = world.catching_up_s
    for number in range(num_steps):
        k = chooser.plan(world.rows, world.seconds)
        asked = [row.request_id for row in world.rows if k]
        world.catching_up_s = catching_up_s * (k > 0)
        plan, verified = world.plan(k), world.step(number, k)
        chooser.observe({name: verified[name] for name in asked})
        chooser.on_priced(ran(plan, world.last_s))
        for name in getattr(world, "ended", ()):
            chooser.forget(name)
    return world.num_tokens / world.seconds


def worlds() -> Iterator[tuple[str, Cell]]:
    for kind, prices in (("drafted", DRAFTED), ("at hand", AT_HAND)):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            for chance in (0.4, 0.6, 0.8):
                make = partial(constant, prices, rows, chance)
                yield f"{kind} {rows} at {chance}", partial(rows_cell, make, steps(rows), False)
        for rows in (1, 4, 16, 64):
            for name, rates in (
                ("mixed", (0.05, 0.3, 0.7, 0.95)),
                ("bad", (0.05, 0.1, 0.3)),
                ("two", (0.02, 0.9)),
            ):
                make = partial(coming, prices, rows, rates)
                yield f"{kind} {rows} {name}", partial(rows_cell, make, 2 * steps(rows), False)
        for rows in (1, 16):
            for before, after in ((0.85, 0.1), (0.1, 0.6)):
                make = partial(changing, prices, rows, before, after)
                name = f"{kind} {rows} {before} and {after} in turn"
                yield name, partial(rows_cell, make, 3200, False)
    for dearer in (0.6, 1.8, 4.0):
        make = partial(dear, dearer)
        yield f"dearer {dearer}", partial(rows_cell, make, 1000, False)
    for rows in (16, 128):
        for chance in (0.3, 0.6, 0.87):
            make = partial(swinging, rows, chance)
            yield f"swinging {rows} at {chance}", partial(rows_cell, make, 800, True)


def steps(rows: int) -> int:
    return max(300, 2400 // rows)


def constant(prices: object, rows: int, chance: float, seed: int) -> World:
    return World(prices, rows, lambda _: chance, seed=rows + 1000 * seed)  # type: ignore[arg-type]


def coming(prices: object, rows: int, rates: Sequence[float], seed: int) -> World:
    return Rows(prices, rows, lambda _: 0.0, seed=seed, rates=rates)  # type: ignore[arg-type]


def changing(prices: object, rows: int, before: float, after: float, seed: int) -> World:
    return World(prices, rows, lambda n: before if n // 400 % 2 == 0 else after, seed=seed)  # type: ignore[arg-type]


def dear(dearer: float, seed: int) -> World:
    return World(DRAFTED, 8, lambda _: 0.7, seed=seed, factor=lambda k: dearer if k else 1.0)


def swinging(rows: int, chance: float, seed: int) -> World:
    seconds = {0: 1.0, 1: 1.83, 2: 2.3, 3: 2.7, 4: 3.0, 6: 3.7, 8: 4.5}
    return World(
        TooCheap(),
        rows,
        lambda _: chance,
        seed=seed,
        factor=lambda k: seconds[k] / TooCheap().seconds(rows, 0, k),
        catching_up_s=3.0,
        speed=busy_host(seed),
    )


# ---------------------------------------------------------------------- a host that takes long


@dataclass(slots=True)
class Bursts(Hosted):
    """Copies of about `copied` tokens behind about `free` tokens of an answer's own."""

    free: float = 0.0
    copied: float = 0.0
    left: dict[str, tuple[bool, float]] = field(default_factory=dict)

    def _run(self, entry: ScheduledRequest, outcome: StepResult) -> int:
        if not self.copied:
            return super(Bursts, self)._run(entry, outcome)
        name = entry.request_id
        is_copy, left = self.left.get(name, (False, self.rng.expovariate(1 / self.free)))
        self.text = COPIES if is_copy else STORIES
        num_new = super(Bursts, self)._run(entry, outcome)
        if (left := left - num_new) <= 0:
            is_copy = not is_copy
            left = self.rng.expovariate(1 / (self.copied if is_copy else self.free))
        self.left[name] = is_copy, left
        return num_new


SMALL_MODEL = Machine(
    lambda k: (260 + 3 * k if k else 170) * MICRO, lambda k: (140 + 45 * k if k else 110) * MICRO
)


def hosted_cell(
    machine: Machine,
    text: Text,
    in_flight: int,
    bursts: tuple[float, float],
    before: Text | None,
    seed: int,
    k: int | None,
) -> float:
    is_drafted, charged = text.is_drafted, [0]
    chooser = Counted(
        Flat(54 * MICRO if is_drafted else 0.0).seconds,
        acceptance=0.7 if is_drafted else 0.5,
        max_drafts=8,
        max_verified_tokens=64,
        looks_ahead=not is_drafted,
    )

    def host_s(num: int) -> float:
        more, charged[0] = chooser.num_chosen - charged[0], chooser.num_chosen
        return machine.host_s(num) + CHOICE_S * more

    def asked(some: Text, num: int, number: int) -> float:
        hosted.Hosted = partial(Bursts, free=bursts[0], copied=bursts[1])  # type: ignore[misc, assignment]
        lengths = DraftLengths(k) if k is not None else chooser
        slow = Machine(host_s, machine.device_s)
        try:
            return hosted.run(
                slow, some, lengths, in_flight=in_flight, seed=number, num_requests=num
            ).tokens_per_s
        finally:
            hosted.Hosted = Hosted  # type: ignore[misc]

    if before is not None:
        asked(before, 8, 100 + seed)
    return asked(text, 24, 1 + seed)


def hosts() -> Iterator[tuple[str, Cell]]:
    texts = {"stories": STORIES, "copies": COPIES, "some": SOME, "seldom good": SELDOM_GOOD}
    for name, machine in (("host", HOST_BOUND), ("device", DEVICE_BOUND)):
        for in_flight in (1, 2):
            for kind, text in texts.items():
                for before, what in (
                    (None, ""),
                    (COPIES, " after copies"),
                    (STORIES, " after stories"),
                ):
                    cell = partial(hosted_cell, machine, text, in_flight, (0.0, 0.0), before)
                    yield f"{name} {in_flight} {kind}{what}", cell
            for free, copied in ((20, 20), (40, 100), (100, 40), (150, 400), (5, 30)):
                cell = partial(hosted_cell, machine, STORIES, in_flight, (free, copied), STORIES)
                yield f"{name} {in_flight} bursts {free} {copied}", cell
    for in_flight in (1, 2):
        for right in (0.3, 0.45, 0.6, 0.85):
            text = Text(1.0, right, right, is_drafted=True)
            yield (
                f"small model {in_flight} at {right}",
                partial(hosted_cell, SMALL_MODEL, text, in_flight, (0.0, 0.0), None),
            )


# ---------------------------------------------------------------------- the table


def main() -> None:
    parser = argparse.ArgumentParser(description="cells of the choice of draft lengths, simulated")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    for name, cell in (*worlds(), *hosts()):
        if re.search(args.only, name):
            free = sum(cell(seed, None) for seed in SEEDS) / len(SEEDS)
            found[name] = [free]
            if args.fixed:
                of = {k: sum(cell(seed, k) for seed in SEEDS) / len(SEEDS) for k in FIXED}
                found[name] += [max(of.values()), of[0]]
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if args.against:
        known = json.loads(args.against.read_text())
        ratios = {name: found[name][0] / known[name][0] for name in found}
        for name, ratio in sorted(ratios.items(), key=lambda one: one[1]):
            if not 0.99 < ratio < 1.01:
                print(f"{ratio:.3f} {name}")
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        print(f"mean {mean:.4f} least {min(ratios.values()):.3f} of {len(ratios)}")


if __name__ == "__main__":
    main()
