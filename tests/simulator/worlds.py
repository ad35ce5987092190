"""Small worlds for the simulator: a linear price, and random work on a random engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ridgeline.request import Request, SamplingParams
from ridgeline.simulator.executor import Answer
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Job, Machine, Options
from ridgeline.step import StepShape

VOCAB = 50
STOPS = (frozenset[int](), frozenset({7}), frozenset({7, 13}))
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None,), (None, 6), (5,), (3, 9))


@dataclass(frozen=True, slots=True)
class LinearPricer:
    """Seconds that no two shapes share by accident, and that have no short binary form."""

    per_step_s: float = 0.011
    per_token_s: float = 0.0007
    per_key_s: float = 1.3e-6

    def seconds(self, shape: StepShape) -> float:
        tokens = sum(new for new, _ in shape)
        keys = sum(new * (before + (new + 1) / 2) for new, before in shape)
        return self.per_step_s + self.per_token_s * tokens + self.per_key_s * keys


@dataclass(frozen=True)
class OneSecond:
    """A pricer for figures by hand."""

    def seconds(self, shape: StepShape) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class World:
    machine: Machine
    options: Options
    seed: int
    num_requests: int
    rate: float

    def jobs(self) -> list[Job]:
        """The same every time: requests are used up by a run."""
        return _jobs(self)


def draw_world(seed: int) -> World:
    """Memory is short or plenty; everything else is drawn as well."""
    rng = random.Random(seed)
    windows, size = rng.choice(WINDOWS), rng.choice([1, 2, 4, 16])
    longest = 85  # tokens of one request, at most
    least = (-(-longest // size) + 2) * len(windows)
    short = least if windows == (None,) else rng.randint(least // 3, least)
    machine = Machine(LinearPricer(), rng.choice([short, short, 2 * least, 9 * least]), windows)
    options = Options(
        policy=rng.choice(["fcfs", "priority"]),
        prefix_caching=rng.random() < 0.7,
        max_in_flight=rng.choice([1, 2, 2, 3]),
        max_num_seqs=rng.choice([1, 2, 8, 32]),
        max_num_batched_tokens=rng.choice([3, 8, 40, 512]),
        block_size=size,
        static_batching=rng.random() < 0.1,
        computes_in_submit=rng.random() < 0.3,
    )
    return World(machine, options, seed, rng.randint(3, 20), rng.choice([0.5, 10.0, 10.0, 60.0]))


def single(world: World) -> World:
    return replace(world, options=replace(world.options, macro_steps=False))


def _jobs(world: World) -> list[Job]:
    rng = random.Random(world.seed + 1)
    stems = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(2)]
    when, jobs = 0.0, list[Job]()
    for index in range(world.num_requests):
        when += rng.expovariate(world.rate) if rng.random() < 0.8 else 0.0
        num_prompt, num_output = rng.randint(1, 40), rng.choice([1, 3, 20, 45, 45])
        common = rng.randint(0, num_prompt)
        prompt = tuple(rng.choice(stems)[:common] + _tokens(rng, num_prompt - common))
        fork_of = None
        if jobs and rng.random() < 0.15:
            parent = rng.choice(jobs).request
            prompt, fork_of = parent.prompt_token_ids, parent.request_id
        sampling = SamplingParams(max_tokens=num_output, stop_token_ids=rng.choice(STOPS))
        request = Request(
            f"r{index}",
            prompt,
            sampling,
            when,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice([b"", b"", b"s"]),
            fork_of=fork_of,
        )
        answer = Answer(len(prompt), tuple(_tokens(rng, num_output)))
        timeline = RequestTimeline(f"r{index}", when, len(prompt), num_output)
        jobs.append(Job(request, answer, timeline))
    return jobs


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]
