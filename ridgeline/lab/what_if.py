"""What if the requests of the last minutes had come to the engine under another setting?

The simulator replays them twice: as the engine is set, and as the reader asks. A step takes its
price, times what the steps of this engine took over their prices. Prompts that began alike do so
again, in made-up tokens, and find in the prefix cache what it then holds, which is nothing at
first; what one found that began like none of these requests is left out of it. Requests that have
not ended, or got no token, are not replayed. A replay ends at its next step when nobody waits for
it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Annotated

import msgspec

from ridgeline.cost.captured import MAX_VERIFIED_TOKENS
from ridgeline.cost.memory import block_bytes
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.step_features import StepFeatures
from ridgeline.errors import RequestFault
from ridgeline.figures import number, seconds
from ridgeline.formats import KV_FORMATS, POLICIES, read_speculate
from ridgeline.lab.page import Control, control, controls, read_record
from ridgeline.observe.engine_header import read_setup
from ridgeline.observe.evidence import Evidence, engine_drafter
from ridgeline.observe.requests import TimeBreakdown
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.options import PLANS_AHEAD_S, Machine, Options
from ridgeline.simulator.report import RequestTimeline, spread
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.workload import FRESH_TOKEN, Arrival, Workload, in_order

WINDOW_S = 600.0
MAX_STEPS = 100_000  # of a replay, if no two requests shared one: older requests are left out


# fmt: off
class Setting(msgspec.Struct, frozen=True):
    max_num_seqs: Annotated[int, control("largest batch", "requests at once", ge=1, le=16384,
                                         scale="log")]
    max_num_batched_tokens: Annotated[int, control("tokens in a step", "at most", ge=1, le=1 << 20,
                                                   scale="log")]
    policy: Annotated[str, control("policy", choices=tuple(POLICIES))]
    kv: Annotated[str, control("KV format", choices=tuple(KV_FORMATS))]
    num_replicas: Annotated[int, control("replicas", "that take requests in turn", ge=1,
                                         le=16)] = 1
# fmt: on


class Seen(msgspec.Struct, frozen=True):
    """`largest_queue`: requests that waited for their first step at once; None: not recorded.
    `num_cached_tokens`: of prompts, found in the prefix cache or left out."""

    first_token_p50_s: float | None
    first_token_p99_s: float | None
    tokens_per_s: float
    num_cached_tokens: int
    largest_queue: int | None = None
    num_refused: int = 0


class WhatIf(msgspec.Struct, frozen=True):
    """`inputs` are the fields of a setting, `measured` is what happened, `today` and `asked` are
    replays under `setting` and `other`. `scale`: what steps took over their prices."""

    inputs: tuple[Control, ...]
    sentence: str
    num_requests: int
    scale: float
    setting: Setting
    other: Setting
    measured: Seen
    today: Seen
    asked: Seen


class Unwanted(Exception):
    """Nobody waits for this replay any more."""


class _SeenPricer(Pricer):
    """Prices as the engine's own steps have borne them out, for as long as somebody wants them."""

    def __init__(self, setup: Setup, scale: float, is_unwanted: Callable[[], bool]) -> None:
        super().__init__(setup)
        self._scale = scale
        self._is_unwanted = is_unwanted

    def seconds_of(
        self,
        features: StepFeatures,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float:
        return self._seen(super().seconds_of(features, num_logits, drafting_s, host_s))

    def decodes_seconds(self, contexts: tuple[int, ...]) -> float:
        return self._seen(super().decodes_seconds(contexts))

    def each_decode(self, contexts: Sequence[int]) -> Iterator[float]:
        return map(self._seen, super().each_decode(contexts))

    def _seen(self, price_s: float) -> float:
        if self._is_unwanted():
            raise Unwanted
        return self._scale * price_s


def what_if(
    evidence: bytes, values: Mapping[str, object], is_unwanted: Callable[[], bool]
) -> bytes:
    """JSON of WhatIf. `values` are fields of Setting; those that are missing stay as they are.
    Raises RequestFault or ConfigError, or Unwanted when it is."""
    found = msgspec.json.decode(evidence, type=Evidence)
    header, setup = found.header, read_setup(found.header.setup)
    now = Setting(
        header.max_num_seqs, header.max_num_batched_tokens, header.policy, setup.precision.kv
    )
    other = read_record(Setting, msgspec.structs.asdict(now) | dict(values))
    budget = min(now.max_num_batched_tokens, other.max_num_batched_tokens)
    requests = _latest(found, budget)
    totals = found.totals
    if not requests or not totals.expected_s:
        raise RequestFault("no request has ended in the last ten minutes; send some, then ask")
    scale = (totals.measured_s + totals.host_s) / totals.expected_s

    def replayed(setting: Setting) -> Seen:
        priced = replace(setup, precision=replace(setup.precision, kv=setting.kv))
        pricer = _SeenPricer(priced, scale, is_unwanted)
        return _replayed(found, requests, pricer, setting)

    today, asked = replayed(now), replayed(other)
    told = WhatIf(
        controls(Setting), _sentence(now, other, today, asked), len(requests), scale,
        now, other, _measured(requests), today, asked,
    )  # fmt: skip
    return msgspec.json.encode(told)


def _latest(found: Evidence, budget: int) -> list[TimeBreakdown]:
    """That ended, the newest first."""
    kept, num_steps = list[TimeBreakdown](), 0
    for one in sorted(found.time_breakdowns, key=lambda one: one.arrival, reverse=True):
        num_steps += one.num_output_tokens + one.num_prompt_tokens // budget
        if found.now - one.arrival > WINDOW_S or (kept and num_steps > MAX_STEPS):
            break
        if one.num_output_tokens:
            kept.append(one)
    return kept


def _replayed(
    found: Evidence, requests: Sequence[TimeBreakdown], pricer: Pricer, setting: Setting
) -> Seen:
    header, setup = found.header, read_setup(found.header.setup)
    size = header.block_size
    bytes_now, bytes_then = block_bytes(setup, size), block_bytes(pricer.setup, size)
    num_blocks = max(1, header.num_blocks * bytes_now // bytes_then)
    options = Options(
        num_replicas=setting.num_replicas,
        policy=setting.policy,
        ttft_slo_s=header.ttft_slo_s,
        tpot_slo_s=header.tpot_slo_s,
        max_in_flight=header.max_in_flight,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_mixed_tokens=header.max_num_mixed_tokens,
        block_size=size,
        prefix_caching=header.prefix_caching,
        speculation=_speculation(found, setup),
        computes_in_submit=header.computes_in_submit,
        plans_ahead_s=None if header.computes_in_submit else PLANS_AHEAD_S,
    )
    machine = Machine(pricer, num_blocks, header.windows)
    work = _arrivals(found, requests)
    report = Simulation(machine, work, options, rng=Random(0)).run()
    summary = report.summary()
    return Seen(
        summary.ttft_s.p50,
        summary.ttft_s.p99,
        summary.output_tokens_per_s,
        sum(one.num_prompt_tokens for one in requests)
        - sum(one.num_input for one in work)
        + sum(one.num_cached for one in report.requests),
        _largest_queue(report.requests),
        summary.num_refused,
    )


def _arrivals(found: Evidence, requests: Sequence[TimeBreakdown]) -> Workload:
    """In made-up tokens: a prompt begins as that of an earlier request did, or as its answer went
    on, and has one token that is its own from there on."""
    order = sorted(requests, key=lambda one: one.arrival)
    others = {one.request_id for one in requests}
    order += [one for one in found.time_breakdowns if one.request_id not in others]
    place = {one.request_id: i for i, one in enumerate(order)}
    prompts: dict[str, tuple[int, ...]] = {}

    def prompt(name: str) -> tuple[int, ...]:
        if name not in prompts:
            one, filler = order[place[name]], FRESH_TOKEN + place[name]
            other, num_alike = found.beginnings.get(name, ("", 0))
            begun: tuple[int, ...] = ()
            if num_alike:
                answer = (FRESH_TOKEN + place[other],) * order[place[other]].num_output_tokens
                begun = (prompt(other) + answer)[: min(num_alike, one.num_prompt_tokens)]
            prompts[name] = begun + (filler,) * (one.num_prompt_tokens - len(begun))
        return prompts[name]

    for name in found.beginnings:
        prompt(name)
    return in_order(
        Arrival(
            one.arrival,
            len(known := prompts.get(one.request_id, ()))
            or max(1, one.num_prompt_tokens - one.num_cached_tokens),
            one.num_output_tokens,
            prompt=known,
            tenant=bytes.fromhex(one.tenant),
        )
        for one in order[: len(requests)]
    )


def _speculation(found: Evidence, setup: Setup) -> Speculation | None:
    """Drafts are right as often as this engine's were, by position."""
    header, drafts = found.header, found.totals.drafts
    if not header.num_drafts:
        return None
    mean = sum(drafts.num_right) / max(1, sum(drafts.num_looked))
    pairs = zip(drafts.num_right, drafts.num_looked, strict=True)
    asked = read_speculate(header.speculate)
    return Speculation(
        header.num_drafts,
        tuple(right / looked if looked else mean for right, looked in pairs)[: header.num_drafts],
        drafter=engine_drafter(header, setup),
        is_chosen=asked is not None and asked.num_draft_tokens is None,
        max_verified_tokens=MAX_VERIFIED_TOKENS["cpu" if header.computes_in_submit else "gpu"],
    )


def _largest_queue(requests: Sequence[RequestTimeline]) -> int:
    """One that begins at once does not wait."""
    changes = [(one.arrival_s, 1) for one in requests if one.queue_s]
    changes += [(one.started_s, -1) for one in requests if one.queue_s and one.started_s]
    waiting = most = 0
    for _, change in sorted(changes):
        waiting += change
        most = max(most, waiting)
    return most


def _measured(requests: Sequence[TimeBreakdown]) -> Seen:
    took = spread(one.first_token - one.arrival for one in requests if one.first_token is not None)
    span_s = max(one.until for one in requests) - min(one.arrival for one in requests)
    num_tokens = sum(one.num_output_tokens for one in requests)
    num_cached = sum(one.num_cached_tokens for one in requests)
    return Seen(took.p50, took.p99, num_tokens / span_s if span_s else 0.0, num_cached)


def _sentence(now: Setting, other: Setting, today: Seen, asked: Seen) -> str:
    changed = [
        f"{name} {getattr(other, name)} instead of {getattr(now, name)}"
        for name in Setting.__struct_fields__
        if getattr(other, name) != getattr(now, name)
    ]
    if not changed:
        return "This is the setting of today; choose another."
    told = f"With {', '.join(changed)}: "
    asked_s, today_s = asked.first_token_p99_s, today.first_token_p99_s
    if asked_s is None or today_s is None:
        return f"{told}no request would fit."
    if asked.num_refused:
        told += f"{asked.num_refused} requests refused, as they would not fit; "
    return (
        f"{told}99 % of first tokens within {seconds(asked_s)} instead of "
        f"{seconds(today_s)}, {number(asked.tokens_per_s)} tokens/s instead of "
        f"{number(today.tokens_per_s)}, and {asked.largest_queue} waiting at most instead of "
        f"{today.largest_queue}."
    )
