"""How long does an operator take, and which resource binds it?

  matmul    c = 2 m n (k + k0) / (e_c P),  b = (bytes + weights k_m / k) / (e_m BW), one row: e_v,
            t = (c^q + b^q + (k_s k)^q)^(1/q) + t0 + q_b 3 m k / BW
  decode    t = max(flops f / (e_c P), (cache f + rest) / (e_m BW)) + t0,
            f = 1 + skew (longest / mean - 1)
  check     decode with f = 1, and w of it for each further token of a request
  prefill   t = flops / (e_c P) + bytes / (e_m BW) + t0
  mixed     prefill s_p t, decode s_d t - t_ov, never less than alone
  stream    t = bytes / (e_m BW) + t0                    (elementwise, embedding, sampling)
  message   see `communication`
  captured  with prompts, all but attention is of the tokens of the size that it was captured in;
            t0 is less; by kernels of our own less still, and gates, of few rows norms too, are
            parts of products; once a step, what is no operator of the model
  warm      weights stay in the last cache: t0 of products and of decodes is less
  step      device = max(sum of t, launches), host = c0 + c1 B; sum, or max when overlapped;
            prompts alone: and what of the host nothing can overlap with

Ideal is max(flops / P, bytes / BW, sent / link) with the data sheet's figures. The forms were
fitted on public tables of kernel times; their constants are in `constants`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.communication import ASKED_FIRST, message_s, wire
from ridgeline.cost.constants import ORIGINS, Calibration, HostConstants, MatmulConstants, Origin
from ridgeline.cost.execution_mode import SINGLE, ExecutionMode, ExecutionModes, sent_tokens
from ridgeline.cost.hardware import Device
from ridgeline.cost.ops import COLLECTIVES, Op, step_ops, token_ops
from ridgeline.cost.setup import Setup
from ridgeline.cost.step_features import StepFeatures, attention_kinds, dealt, step_features
from ridgeline.step import StepShape

BOUNDS = ("compute", "memory", "link", "latency")
WRITES_CACHE = "rope_and_cache"  # of few tokens by the kernel that attends, which waits for both
QUANTITIES = ("m", "n", "k", "flops", "bytes", "sent_bytes")


@dataclass(frozen=True, slots=True)
class OpCost:
    """Seconds of ALL `op.count` of them together. `bound` is compute, memory, link or latency
    (launches and small messages)."""

    op: Op
    ideal_s: float
    expected_s: float
    bound: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class StepCost:
    """`ideal_s` has no host time. `expected_s` is from its first to its last operator, through all
    pipeline stages; `device_s` is the devices' part of it, `host_s` all host work, hidden or not.
    `flops` and `bytes` are of one rank."""

    ops: tuple[OpCost, ...]
    host_s: float
    ideal_s: float
    expected_s: float
    bound: str
    flops: float
    bytes: float
    origin: Origin
    device_s: float = 0.0

    def seconds_by_bound(self) -> dict[str, float]:
        """Expected seconds of the operators by the resource that binds each."""
        return _seconds_by_bound(self.ops)


def step_cost(setup: Setup, shape: StepShape, num_logits: int | None = None) -> StepCost:
    """The cost of a step of (new tokens, context before them) per request."""
    groups = [one for one in dealt(shape, setup.layout.dp) if one]
    costs = [_group_cost(setup, one, num_logits, shape) for one in groups or [shape]]
    return max(costs, key=lambda cost: cost.expected_s)


def _group_cost(
    setup: Setup, shape: StepShape, num_logits: int | None, every: StepShape
) -> StepCost:
    """Of the devices that have `shape` of a step; `every` is all of it."""
    constants, device = setup.constants, setup.device
    features, wave, own = step_features(tuple(attention_kinds(setup.spec)), shape), None, num_logits
    if len(every) > len(shape):
        wave = sum(new for new, _ in every), len(every) if num_logits is None else num_logits
        own = None if num_logits is None else -(-num_logits * len(shape) // len(every))
    ops = step_ops(setup.spec, shape, setup.layout, setup.precision, own, wave)
    mode = ExecutionModes(setup).of(features)
    costs = tuple(op_cost(op, device, constants, mode) for op in ops)
    sent = sent_tokens(constants.host, mode, features)
    if sent > features.num_tokens:
        costs = _as_sent(costs, setup, mode, features.num_tokens, sent)
    beside_s = constants.host.captured_s if mode.captured else 0.0
    device_s, host_s, expected_s = combine(
        constants.host,
        sum(cost.expected_s for cost in costs) + beside_s,
        len(every),
        0 if mode.captured else sum(op.count for op in ops),
        is_lone=is_lone(features),
        num_verified=features.num_verified,
    )
    return StepCost(
        costs,
        host_s,
        sum(cost.ideal_s for cost in costs),
        expected_s,
        _step_bound(costs, device_s - beside_s, expected_s),
        sum(op.count * op.flops for op in ops),
        sum(op.count * op.bytes for op in ops),
        _worst({cost.origin for cost in costs}, constants.origin),
        device_s,
    )


def _as_sent(
    costs: Sequence[OpCost], setup: Setup, mode: ExecutionMode, num_tokens: int, sent: int
) -> tuple[OpCost, ...]:
    """With what the operators of that many tokens take longer for `sent` of them. What must be read
    and computed, and what binds, is still that of the tokens there are."""
    constants, device = setup.constants, setup.device
    more: dict[Op, float] = {}
    both = (token_ops(setup.spec, n, setup.layout, setup.precision) for n in (num_tokens, sent))
    for op, as_sent in zip(*both, strict=True):
        more_s = op_cost(as_sent, device, constants, mode).expected_s
        more_s -= op_cost(op, device, constants, mode).expected_s
        one = replace(op, count=1)
        more[one] = more.get(one, 0.0) + more_s
    return tuple(
        replace(cost, expected_s=cost.expected_s + more.get(replace(cost.op, count=1), 0.0))
        for cost in costs
    )


def is_lone(features: StepFeatures) -> bool:
    """Prompts and nothing else: no step before it is sure to run while it is prepared."""
    return features.has_prompts and not features.num_decodes


def combine(
    host: HostConstants,
    kernels_s: float,
    num_requests: int,
    num_launches: int,
    *,
    is_lone: bool = False,
    num_verified: int = 0,
    more_s: float = 0.0,
) -> tuple[float, float, float]:
    """(device, host, step) seconds: launches run ahead of kernels, and the host's plan of the next
    step beside both when it is overlapped (on the same thread as the launches). `is_lone`: of
    prompts alone, that find the device idle. `num_verified` of the requests have drafts. `more_s`
    is what the host does beside what it does for all such steps."""
    plan_s = host.c0_s + host.c1_s * num_requests + host.check_request_s * num_verified + more_s
    launch_s = host.per_launch_s * num_launches
    if host.overlapped:
        waits_s = host.lone_s + host.lone_request_s * num_requests if is_lone else 0.0
        host_s = max(plan_s, waits_s, host.lone_least_s if is_lone else 0.0) + launch_s
        return kernels_s, host_s, max(host_s, waits_s + max(kernels_s, launch_s))
    device_s = max(kernels_s, launch_s)
    return device_s, plan_s + launch_s, plan_s + device_s


def op_cost(
    op: Op, device: Device, calibration: Calibration, mode: ExecutionMode = SINGLE
) -> OpCost:
    """Ideal and expected seconds of all `op.count`, and what binds."""
    parts = _parts(op, device, calibration, mode)
    ideal = ideal_seconds(op, device)
    expected = max(parts.pop("total"), ideal)
    return OpCost(
        op,
        op.count * ideal,
        op.count * expected,
        max(parts, key=lambda name: parts[name]),
        _origin(op, calibration),
    )


def ideal_seconds(op: Op, device: Device) -> float:
    """Of one of `op.count`."""
    if op.kind in COLLECTIVES:
        return op.sent_bytes / wire(device, op.ranks).bytes_per_s
    return max(op.flops / device.peak(op.dtype_on(device.kind)), op.bytes / device.bandwidth)


def _parts(
    op: Op, device: Device, calibration: Calibration, mode: ExecutionMode
) -> dict[str, float]:
    """Seconds of one: "total", and the share of each resource by itself."""
    host = calibration.host
    wait = mode.wait(host)
    if op.name in mode.own.value:
        return {"total": 0.0, "memory": op.bytes / device.bandwidth}
    if op.kind in COLLECTIVES:
        return _message_parts(op, device, calibration)
    if op.kind == "matmul":
        constants = calibration.matmul_for(op.dtype_on(device.kind), op.weights)
        return _matmul_parts(op, device, constants, wait * mode.product_t0(host))
    if op.kind == "decode_attention":
        return _decode_parts(op, device, calibration, wait)
    if op.kind == "prefill_attention":
        return _prefill_parts(op, device, calibration)
    if op.kind == "check_attention":
        return _check_parts(op, device, calibration, wait)
    launch = mode.pass_t0(host) * (wait if op.name == WRITES_CACHE else 1.0)
    stream = calibration.stream_for(op.name, op.kind, op.dtype)
    memory, latency = op.bytes / (stream.e_m * device.bandwidth), launch * stream.t0_s
    return {"total": memory + latency, "memory": memory, "latency": latency}


def _matmul_parts(
    op: Op, device: Device, constants: MatmulConstants, launch: float
) -> dict[str, float]:
    c = constants
    peak = device.peak(op.dtype_on(device.kind))
    compute = op.flops * (1 + c.k0 / op.k) / (c.e_c * peak)
    rounding = c.q_b * 3 * op.m * op.k / device.bandwidth
    share = c.e_v if op.m == 1 and c.e_v is not None else c.e_m
    memory = (op.bytes + op.weight_bytes * c.k_m / op.k) / (share * device.bandwidth)
    latency, chain = launch * c.t0_s, c.k_s * op.k
    total = power_sum(power_sum(compute, memory, c.q), chain, c.q) + latency + rounding
    return {
        "total": total,
        "compute": compute,
        "memory": memory + rounding,
        "latency": latency + chain,
    }


def power_sum(a: float, b: float, q: float) -> float:
    """(a^q + b^q)^(1/q) without overflow; q of infinity is the larger one."""
    large, small = (a, b) if a > b else (b, a)
    if large == 0.0 or math.isinf(q):
        return large
    return large * float((1.0 + (small / large) ** q) ** (1.0 / q))


def _decode_parts(
    op: Op, device: Device, calibration: Calibration, wait: float
) -> dict[str, float]:
    c = calibration.attention_for(op.dtype)
    t0_s = wait * c.decode_t0_s
    stretch = 1.0 + c.skew * (op.m * op.n / op.k - 1.0) if op.k else 1.0
    compute = op.flops * stretch / (c.decode_e_c * device.peak(op.dtype))
    rest = op.bytes - op.kv_bytes
    memory = (op.kv_bytes * stretch + rest) / (c.decode_e_m * device.bandwidth)
    alone = max(compute, memory) + t0_s
    total = max(alone, c.mixed_decode * alone - c.mixed_overlap_s) if op.mixed else alone
    return {"total": total, "compute": compute, "memory": memory, "latency": t0_s}


def _prefill_parts(op: Op, device: Device, calibration: Calibration) -> dict[str, float]:
    c = calibration.attention_for(op.dtype)
    compute = op.flops / (c.prefill_e_c * device.peak(op.dtype))
    memory = op.bytes / (c.prefill_e_m * device.bandwidth)
    alone = compute + memory + c.prefill_t0_s
    total = alone * max(1.0, c.mixed_prefill) if op.mixed else alone
    return {"total": total, "compute": compute, "memory": memory, "latency": c.prefill_t0_s}


def _check_parts(op: Op, device: Device, calibration: Calibration, wait: float) -> dict[str, float]:
    c = calibration.attention_for(op.dtype)
    t0_s = wait * c.decode_t0_s
    compute = op.flops / (c.decode_e_c * device.peak(op.dtype))
    memory = op.bytes / (c.decode_e_m * device.bandwidth)
    total, latency = c.verify_s(max(compute, memory) + t0_s, op.n), c.verify_s(t0_s, op.n)
    return {"total": total, "compute": compute, "memory": memory, "latency": latency}


def _message_parts(op: Op, device: Device, calibration: Calibration) -> dict[str, float]:
    way, messages = wire(device, op.ranks), calibration.messages
    alpha = way.latency_s if messages.alpha_s is None else messages.alpha_s
    if op.kind == "point_to_point" and device.kind == "cpu":
        alpha *= ASKED_FIRST
    speed = messages.efficiency * way.bytes_per_s
    total = message_s(op.kind, op.sent_bytes, op.ranks, speed, alpha, is_direct=way.is_direct)
    link = min(total, op.sent_bytes / speed)
    return {"total": total, "link": link, "latency": total - link}


# ------------------------------------------------------------------------ labels


def _origin(op: Op, calibration: Calibration) -> Origin:
    if calibration.origin == "assumed" or op.kind in calibration.assumed_kinds:
        return "assumed"
    for quantity in QUANTITIES:
        bounds = calibration.ranges.get(f"{op.kind}.{quantity}")
        if bounds is not None and not bounds[0] <= getattr(op, quantity) <= bounds[1]:
            return "extrapolated"
    return calibration.origin


def _worst(origins: set[Origin], default: Origin) -> Origin:
    return max(origins, key=ORIGINS.index) if origins else default


def _seconds_by_bound(costs: tuple[OpCost, ...]) -> dict[str, float]:
    seconds = dict.fromkeys(BOUNDS, 0.0)
    for cost in costs:
        seconds[cost.bound] += cost.expected_s
    return seconds


def _step_bound(costs: tuple[OpCost, ...], operators_s: float, expected_s: float) -> str:
    """The resource that most of the step waits for; what is no operator, as waiting for the host,
    is latency."""
    seconds = _seconds_by_bound(costs)
    seconds["latency"] += expected_s - operators_s
    return max(seconds, key=lambda name: seconds[name])
