"""What exactly does a command line ask to simulate? Its model, machine, traffic and engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from ridgeline import registry
from ridgeline.cli.machine import make_setup, price_band, read_model
from ridgeline.cli.session import note, stage
from ridgeline.cost.captured import MAX_VERIFIED_TOKENS, mixed_tokens
from ridgeline.cost.constants import ORIGINS, Origin
from ridgeline.cost.memory import device_kind
from ridgeline.cost.money import Band
from ridgeline.cost.pipeline import step_prices
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import Layout, Setup
from ridgeline.cost.steady_state import slots, token_budget
from ridgeline.cost.throughput import Load, Throughput, decode_shape, saturation
from ridgeline.errors import ConfigError
from ridgeline.figures import number
from ridgeline.formats import AUTO_DRAFT_TOKENS, POLICIES
from ridgeline.router import POLICIES as ROUTERS
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.options import PLANS_AHEAD_S, Options
from ridgeline.simulator.report import Slo
from ridgeline.simulator.simulation import Simulation, SimulationReport
from ridgeline.simulator.sweep import Outcome, Sweep, sweep
from ridgeline.simulator.traces import read_trace
from ridgeline.simulator.workload import (
    DEFAULT_REQUESTS,
    Arrival,
    Workload,
    at_rate,
    fixed,
    generate,
    mean_rate,
    rearranged,
)
from ridgeline.speculation.price import DraftSteps

DEFAULT_INPUT, DEFAULT_OUTPUT = fixed(512), fixed(128)
SWEEP_BATCHES = 5  # a saturated run of a sweep fills the largest batch about so many times
CALM = 0.75  # below this share of the capacity few requests are in flight, and fewer will do
MIN_SWEEP_REQUESTS, MAX_SWEEP_REQUESTS = 500, 5000


@dataclass(frozen=True, slots=True)
class Case:
    """One question, ready to be run at its own rate or at many. `usd_per_hour` is of all devices
    together, None when nobody knows a price."""

    args: argparse.Namespace
    setup: Setup
    workload: Workload
    options: Options
    slo: Slo
    usd_per_hour: Band | None

    @property
    def num_devices(self) -> int:
        return self.setup.layout.all_devices

    def run(self, workload: Sequence[Arrival]) -> SimulationReport:
        """Raises DoesNotFit, and ConfigError for options that do not go together."""
        rng = Random(self.args.seed + 1)
        return Simulation(self.setup, workload, self.options, rng=rng).run()

    def outcome(self, report: SimulationReport) -> Outcome:
        paid = None if self.usd_per_hour is None else self.usd_per_hour.mid
        return Outcome(report.requests, report.summary(self.slo, paid))

    def sweep(self, throughput: Throughput) -> Sweep:
        """The same traffic at many rates, `throughput` being an estimate of the highest. The
        requests of a trace keep their order and arrive anew: busy hours would hide the capacity."""
        args, replicas = self.args, self.setup.layout.replicas
        estimate, batch = throughput.request_rate * replicas, throughput.load.batch * replicas

        def at(rate: float) -> Outcome:
            count = args.requests or sweep_requests(batch, rate / estimate)
            workload = (
                rearranged(self.workload, Random(args.seed), rate, args.arrivals or "poisson")
                if args.trace
                else generated(args, rate, count)
            )
            with stage(args, f"{len(workload)} requests at {number(rate)} a second"):
                return self.outcome(self.run(workload))

        return sweep(at, estimate)

    def closed_form(self) -> Throughput:
        """The throughput at which one replica is full, for requests of the mean lengths."""
        options, (num_input, num_output) = self.options, self.mean_lengths
        full = Simulation(self.setup, self.workload, options, rng=Random(0))
        blocks = full.machine.num_blocks // len(full.machine.windows)
        places = blocks * options.block_size // (num_input + num_output)
        batch = max(1, min(full.limits.max_num_seqs, places))
        budget = max(full.limits.max_num_batched_tokens, batch)
        load, stages = Load(1, num_input, num_output, budget), self.setup.layout.pp
        pricer = full.machine.pricer if stages == 1 else step_prices(self.setup)
        return saturation(pricer, load, batch, stages)

    def least_requests(self, throughput: Throughput) -> int:
        """How many requests a run needs to tell the capacity: those that fill empty places wait for
        nobody, so where most of them do, the capacity reads too high."""
        return SWEEP_BATCHES * throughput.load.batch * self.setup.layout.replicas

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer."""
        work = self.workload
        return (
            max(1, round(sum(a.num_input for a in work) / len(work))),
            max(1, round(sum(a.num_output for a in work) / len(work))),
        )

    def origin(self, in_flight: float) -> Origin:
        """Where the weakest figure comes from, of a step of so many decodes in all replicas and of
        one that reads a prompt."""
        num_input, num_output = self.mean_lengths
        layout, chunk = self.setup.layout, min(num_input, self.options.max_num_batched_tokens)
        batch = max(1, round(in_flight / layout.replicas / layout.pp))
        middle = num_input + max(0, num_output - 2) // 2
        shapes = (decode_shape(batch, middle), ((chunk, (num_input - chunk) // 2),))
        return max((step_cost(self.setup, shape).origin for shape in shapes), key=ORIGINS.index)


def sweep_requests(batch: int, load: float) -> int:
    """How many requests show what a machine does that is full with `batch`, at this load."""
    if load < CALM:
        return MIN_SWEEP_REQUESTS
    return max(MIN_SWEEP_REQUESTS, min(MAX_SWEEP_REQUESTS, SWEEP_BATCHES * batch))


def make_case(args: argparse.Namespace) -> Case:
    """Raises ConfigError for what cannot be simulated, DoesNotFit for what has no room."""
    slo = Slo(args.ttft, args.tpot)
    _check(args)
    workload = make_workload(args)
    setup = _replicated(args)
    limit = args.max_model_len or setup.spec.max_position_embeddings
    short = tuple(a for a in workload if a.num_input + a.num_output <= limit)
    if not short:
        raise ConfigError(
            f"every request is longer than {limit} tokens, which is all that the model takes; "
            "lower --input and --output or raise --max-model-len"
        )
    if len(short) < len(workload):
        left_out = len(workload) - len(short)
        note(args, f"{left_out} requests of more than {limit} tokens are left out")
    options = make_options(args, setup, limit, short)
    return Case(args, setup, short, options, slo, _price(args, setup))


def _check(args: argparse.Namespace) -> None:
    """What goes together, before a machine is measured."""
    needs_promise = _needs_promise(args)
    if needs_promise and (args.ttft is None or args.tpot is None):
        raise ConfigError(f"--policy {args.policy} needs what is promised: --ttft and --tpot")
    if args.max_num_mixed_tokens is not None and (needs_promise or args.no_chunked_prefill):
        raise ConfigError(
            f"--max-num-mixed-tokens {args.max_num_mixed_tokens}: only with chunked prefill, and "
            "not with policy slo, which bounds steps itself"
        )
    if args.draft is not None and args.speculate is None:
        raise ConfigError("--draft needs --speculate K:ACCEPTANCE")


def _needs_promise(args: argparse.Namespace) -> bool:
    return bool(registry.load(POLICIES, args.policy, "policy").needs_promise)


# ---------------------------------------------------------------------- machine


def _replicated(args: argparse.Namespace) -> Setup:
    setup = make_setup(args)
    return replace(setup, layout=replace(setup.layout, replicas=args.replicas))


def _mixed_tokens(args: argparse.Namespace, setup: Setup, *, is_bounded: bool) -> int | None:
    """As `serve` decides it, with the same prices. `is_bounded`: by the policy."""
    if args.max_num_mixed_tokens is not None:
        return int(args.max_num_mixed_tokens)
    if is_bounded or args.no_chunked_prefill or args.batching == "static":
        return None
    return mixed_tokens(setup, Pricer(setup), _step_tokens(args, setup))


def _step_tokens(args: argparse.Namespace, setup: Setup) -> int:
    asked = args.max_num_batched_tokens
    return token_budget(setup) if asked is None else int(asked)


def _price(args: argparse.Namespace, setup: Setup) -> Band | None:
    band = price_band(args, setup.device)
    return None if band is None else band.map(lambda price: price * setup.layout.all_devices)


def _speculation(args: argparse.Namespace, setup: Setup) -> Speculation | None:
    if args.speculate is None:
        return None
    num_drafts, acceptance = args.speculate
    kind = device_kind(setup.device.kind)
    most, drafter = num_drafts or AUTO_DRAFT_TOKENS[kind], None
    if args.draft is not None:
        draft = read_model(args.draft)
        drafter = DraftSteps(
            Pricer(Setup(draft, setup.device, Layout(), setup.precision, setup.calibration))
        )
    return Speculation(
        most,
        (acceptance,) * most,
        drafter=drafter,
        is_chosen=num_drafts is None,
        max_verified_tokens=MAX_VERIFIED_TOKENS[kind],
    )


# ---------------------------------------------------------------------- traffic


def make_workload(args: argparse.Namespace) -> Workload:
    if args.trace is None:
        if args.rate is None:
            raise ConfigError("say which traffic: --rate R, or --trace FILE")
        return generated(args, args.rate, args.requests or DEFAULT_REQUESTS)
    for name in ("input", "output"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for made-up traffic; the trace says its own")
    workload = read_trace(args.trace, args.requests)
    if args.arrivals is None:
        return workload if args.rate is None else at_rate(workload, args.rate)
    rate = args.rate or mean_rate(workload)
    return rearranged(workload, Random(args.seed), rate, args.arrivals)


def generated(args: argparse.Namespace, rate: float, count: int) -> Workload:
    return generate(
        Random(args.seed),
        rate=rate,
        num_requests=count,
        num_input=args.input or DEFAULT_INPUT,
        num_output=args.output or DEFAULT_OUTPUT,
        arrivals=args.arrivals or "poisson",
    )


# ---------------------------------------------------------------------- engine


def make_options(args: argparse.Namespace, setup: Setup, limit: int, workload: Workload) -> Options:
    longest = max(a.num_input + a.num_output for a in workload)
    return Options(
        num_replicas=args.replicas,
        router=registry.load(ROUTERS, args.router, "router policy")(),
        policy=args.policy,
        ttft_slo_s=args.ttft,
        tpot_slo_s=args.tpot,
        static_batching=args.batching == "static",
        chunked_prefill=not args.no_chunked_prefill,
        paging=not args.no_paging,
        prefix_caching=not args.no_prefix_cache,
        max_in_flight=args.max_in_flight,
        max_num_seqs=slots(setup) if args.max_num_seqs is None else args.max_num_seqs,
        max_num_batched_tokens=_step_tokens(args, setup),
        max_num_mixed_tokens=_mixed_tokens(args, setup, is_bounded=_needs_promise(args)),
        max_model_len=args.max_model_len or min(limit, longest),
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        memory_utilization=args.memory_utilization,
        speculation=_speculation(args, setup),
        computes_in_submit=setup.device.kind == "cpu",
        plans_ahead_s=None if args.no_deferred_scheduling else PLANS_AHEAD_S,
    )
