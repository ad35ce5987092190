"""What if some replicas only read prompts and the others only answer?

A request is read on one replica, which gives its first token; its keys and values are sent on, and
another replica gives the other tokens. Each side is a simulation of its own with the engine's own
scheduler, as nothing comes back from the second to the first. Assumed: keys and values are sent
when the prompt has been read, each cache on a link of its own, and are kept somewhere until the
second replica has room, which also brings back what it preempts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ridgeline.clock import Rng
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.step_features import StepFeatures
from ridgeline.errors import ConfigError
from ridgeline.simulator.options import Machine, Options
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Simulation, SimulationReport
from ridgeline.simulator.workload import Arrival
from ridgeline.step import StepShape


class _Brought(Pricer):
    """A whole prompt comes with the keys and values of all tokens but its last."""

    def features(self, shape: StepShape) -> StepFeatures:
        return super().features(
            tuple((new, before) if before else (1, new - 1) for new, before in shape)
        )


def run_disaggregated(
    pricer: Pricer,
    machine: Machine,
    workload: Sequence[Arrival],
    options: Options,
    num_readers: int,
    transfer_s: Callable[[int], float],
    make_rng: Callable[[], Rng],
) -> tuple[SimulationReport, list[RequestTimeline]]:
    """The first `num_readers` of `options.num_replicas` only read. `machine` is one replica, with
    the prices of `pricer`; `transfer_s` are seconds of the keys and values of so many tokens. With
    the report come the same requests with their second token as the first: whether both sides keep
    up is seen there."""
    num_replicas = options.num_replicas or 1
    if not 0 < num_readers < num_replicas:
        raise ConfigError(
            f"readers is {num_readers} of {num_replicas} replicas; each side needs one: choose "
            "fewer, or more devices"
        )
    if options.static_batching or options.outages:
        raise ConfigError(
            "readers: replicas that only read go with continuous batching and none that is lost; "
            "set it to 0, or change that"
        )
    one_token = [replace(one, num_output=1) for one in workload]
    first_side = replace(options, num_replicas=num_readers, speculation=None)
    read = Simulation(machine, one_token, first_side, rng=make_rng()).run()
    left = [(i, one.finished_s) for i, one in enumerate(read.requests) if one.is_finished]
    work = sorted(
        (
            Arrival(when + transfer_s(workload[i].num_input), workload[i].num_input + 1,
                    workload[i].num_output - 1, id=str(i), tenant=workload[i].tenant)
            for i, when in left if when is not None and workload[i].num_output > 1
        ),
        key=lambda one: one.time_s,
    )  # fmt: skip
    second_side = replace(
        options,
        num_replicas=num_replicas - num_readers,
        prefix_caching=False,
        max_num_batched_tokens=sum(one.num_input for one in work) + options.max_num_seqs,
        max_num_mixed_tokens=None,
    )
    told = Simulation(
        replace(machine, pricer=_Brought(pricer.setup)), work, second_side, rng=make_rng()
    ).run()
    requests = [replace(one, num_output=asked.num_output)
                for one, asked in zip(read.requests, workload, strict=True)]  # fmt: skip
    seconds = [replace(one) for one in requests]
    for end in told.requests:
        request, second = requests[int(end.id)], seconds[int(end.id)]
        request.read_by, request.replica = request.replica, num_readers + end.replica
        request.finished_s = second.finished_s = end.finished_s
        request.num_preemptions, request.refused = end.num_preemptions, end.refused
        second.first_token_s = end.first_token_s
    steps = [msgspec.structs.replace(one, replica=num_readers + one.replica) for one in told.steps]
    report = SimulationReport(
        requests, read.steps + steps, read.num_slots, read.num_blocks,
        num_replicas, read.num_leaps + told.num_leaps,
    )  # fmt: skip
    return report, seconds
