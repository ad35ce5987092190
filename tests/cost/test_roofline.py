"""What a step costs behaves as it must: more work never takes less time, and nothing beats the
data sheet."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    MatmulConstants,
    MessageConstants,
    StreamConstants,
    default_calibration,
)
from ridgeline.cost.execution_mode import ExecutionMode
from ridgeline.cost.hardware import Device, Link, catalogue
from ridgeline.cost.ops import Op
from ridgeline.cost.roofline import BOUNDS, combine, op_cost, power_sum, step_cost
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.step import StepShape
from tests.cost.random_setups import (
    LLAMA_8B,
    LLAMA_70B,
    device,
    random_setup,
    random_shape,
    spec_of,
)

# 100 TFLOP/s, 1 TB/s, links of 100 GB/s and 10 us: figures that one can divide in the head.
ROUND = Device(
    name="round",
    label="Round",
    kind="gpu",
    peak_flops={"bf16": 1e14, "fp8": 2e14},
    memory_bytes=10**11,
    bandwidth=1e12,
    l2_bytes=0,
    link=Link("wire", 1e11, 1e-5, 8, 1e11),
    host_link_bytes_per_s=3e10,
    network_bytes_per_s=1e10,
    watts=500.0,
    all_in_kw=None,
    prices=(),
    sources={},
    vendor="nobody",
)
SHARES = Calibration(
    device_name="round",
    matmul={"bf16": MatmulConstants(0.5, 0.8, 2e-6)},
    attention={"bf16": AttentionConstants(0.5, 1e-5, 0.25, 0.5, 2e-5)},
    elementwise=StreamConstants(0.5, 1e-6),
    sampling=StreamConstants(0.25, 3e-5),
    messages=MessageConstants(0.5),
)
MATMUL = Op("x", "matmul", 1, 2 * 64 * 1000 * 500, 1e6, 1e5, m=64, n=1000, k=500)
DECODE = Op("x", "decode_attention", 1, 1e6, 1e6, 1e3, m=4, n=100, k=200, kv_bytes=9e5)
PREFILL = Op("x", "prefill_attention", 1, 1e10, 2e6, 0.0, m=100, n=1, k=100)


def seconds(op: Op, calibration: Calibration = SHARES, *, captured: bool = False) -> float:
    return op_cost(op, ROUND, calibration, ExecutionMode(captured)).expected_s


def with_matmul(**changes: float) -> Calibration:
    return replace(SHARES, matmul={"bf16": replace(SHARES.matmul["bf16"], **changes)})


def with_attention(**changes: float) -> Calibration:
    return replace(SHARES, attention={"bf16": replace(SHARES.attention["bf16"], **changes)})


# ------------------------------------------------------------------------ formulas


def test_a_product_is_the_slower_of_arithmetic_and_memory() -> None:
    compute, memory = 6.4e7 / 5e13, 1.1e6 / 8e11
    assert seconds(MATMUL) == pytest.approx(max(compute, memory) + 2e-6)
    assert seconds(MATMUL, with_matmul(q=1.0)) == pytest.approx(compute + memory + 2e-6)
    q3 = (compute**3 + memory**3) ** (1 / 3)
    assert seconds(MATMUL, with_matmul(q=3.0)) == pytest.approx(q3 + 2e-6)
    filled = compute * (1 + 250 / 500)
    assert seconds(MATMUL, with_matmul(k0=250.0)) == pytest.approx(filled + 2e-6)
    rounding = 2.0 * 3 * 64 * 500 / 1e12
    expected = max(compute, memory) + rounding + 2e-6
    assert seconds(MATMUL, with_matmul(q_b=2.0)) == pytest.approx(expected)
    assert op_cost(MATMUL, ROUND, SHARES).ideal_s == pytest.approx(1.1e-6)


def test_a_captured_kernel_starts_sooner() -> None:
    assert seconds(MATMUL) - seconds(MATMUL, captured=True) == pytest.approx(0.65 * 2e-6)
    assert seconds(DECODE) == seconds(DECODE, captured=True)


def test_what_reads_from_the_last_cache_waits_less() -> None:
    known = with_attention(verify_token=0.1)
    known = replace(known, host=replace(known.host, warm_t0=0.4))
    check = replace(DECODE, kind="check_attention", n=3)
    writes, norm = (Op(name, "elementwise", 1, 0, 4e5, 1e5) for name in ("rope_and_cache", "norm"))

    def saved(op: Op, warm: float) -> float:
        cold_s = op_cost(op, ROUND, known, ExecutionMode(True)).expected_s
        return cold_s - op_cost(op, ROUND, known, ExecutionMode(True, warm=warm)).expected_s

    t0_s = SHARES.host.captured_t0 * 2e-6
    assert saved(MATMUL, 1.0) == pytest.approx(0.6 * t0_s)
    assert saved(MATMUL, 0.5) == pytest.approx(0.3 * t0_s)
    assert saved(DECODE, 1.0) == pytest.approx(0.6 * 1e-5)
    assert saved(check, 1.0) == pytest.approx(0.6 * 1e-5 * 1.2)
    assert saved(writes, 1.0) == pytest.approx(0.6 * SHARES.host.captured_t0 * 1e-6)
    assert saved(norm, 1.0) == 0.0  # what it reads has just been written


def test_decode_attention_reads_the_cache() -> None:
    assert seconds(DECODE) == pytest.approx((1e6 + 1e3) / 5e11 + 1e-5)
    # The longest has twice the mean: with full skew all take as long as it does.
    stretched = (9e5 * 2 + 1e5 + 1e3) / 5e11 + 1e-5
    assert seconds(DECODE, with_attention(skew=1.0)) == pytest.approx(stretched)
    slow = with_attention(decode_e_c=0.001)
    assert seconds(DECODE, slow) == pytest.approx(1e6 / 1e11 + 1e-5)


def test_prefill_attention_computes_pairs_and_reads_keys() -> None:
    assert seconds(PREFILL) == pytest.approx(1e10 / 2.5e13 + 2e6 / 5e11 + 2e-5)


def test_in_a_mixed_step_decode_attention_slows_down() -> None:
    both = with_attention(mixed_prefill=1.1, mixed_decode=2.0, mixed_overlap_s=3e-6)
    decode, prefill = replace(DECODE, mixed=True), replace(PREFILL, mixed=True)
    assert seconds(prefill, both) == pytest.approx(1.1 * seconds(PREFILL))
    assert seconds(decode, both) == pytest.approx(2 * seconds(DECODE) - 3e-6)
    much = with_attention(mixed_decode=1.0, mixed_overlap_s=1.0)
    assert seconds(decode, much) == seconds(DECODE)  # company never makes it faster


def test_streams_and_messages() -> None:
    assert seconds(Op("x", "elementwise", 3, 0, 4e5, 1e5)) == pytest.approx(3 * (1e-6 + 1e-6))
    assert seconds(Op("x", "sampling", 1, 0, 4e5, 1e5)) == pytest.approx(2e-6 + 3e-5)
    message = Op("x", "all_to_all", 2, 0, 0, 0, 5e4, ranks=4)
    assert seconds(message) == pytest.approx(2 * (1e-5 + 5e4 / 5e10))
    cost = op_cost(message, ROUND, SHARES)
    assert cost.ideal_s == pytest.approx(2 * 5e4 / 1e11)
    assert cost.bound == "latency"


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (0.0, 3.0), (2.0, 2.0), (1e-9, 1e9)])
def test_power_sum(a: float, b: float) -> None:
    assert power_sum(a, b, 1.0) == pytest.approx(a + b)
    assert power_sum(a, b, float("inf")) == max(a, b)
    assert max(a, b) <= power_sum(a, b, 2.0) == power_sum(b, a, 2.0) <= a + b


def test_small_products_wait_for_the_chain_over_k_and_large_ones_hide_it() -> None:
    chained = with_matmul(q=3.0, k_s=1e-8)
    small = replace(MATMUL, flops=2e3, m=1, n=100, read_bytes=1e3, write_bytes=0.0)
    t0 = SHARES.matmul["bf16"].t0_s
    assert seconds(small, chained) == pytest.approx(500 * 1e-8 + t0, rel=1e-2)
    assert seconds(replace(small, k=1000), chained) == pytest.approx(1000 * 1e-8 + t0, rel=1e-2)
    assert op_cost(small, ROUND, chained).bound == "latency"
    large = replace(MATMUL, flops=1e11, read_bytes=1e8)
    assert seconds(large, chained) == pytest.approx(seconds(large, with_matmul(q=3.0)), rel=1e-3)


def test_launches_run_ahead_and_plans_are_hidden() -> None:
    """(device, host, step) of 10 ms of kernels, 2 ms of planning and 300 launches."""
    host = HostConstants(c0_s=1e-3, c1_s=1e-4, per_launch_s=1e-5, overlapped=True)
    assert combine(host, 0.010, 10, 300) == pytest.approx((0.010, 0.005, 0.010))
    assert combine(host, 0.004, 10, 300) == pytest.approx((0.004, 0.005, 0.005))
    serial = replace(host, overlapped=False)
    assert combine(serial, 0.010, 10, 300) == pytest.approx((0.010, 0.005, 0.012))
    assert combine(serial, 0.001, 10, 300) == pytest.approx((0.003, 0.005, 0.005))
    assert combine(serial, 0.001, 10, 0) == pytest.approx((0.001, 0.002, 0.003))


# ------------------------------------------------------------------------ invariants


@pytest.mark.parametrize("seed", range(100))
def test_nothing_beats_the_data_sheet(seed: int) -> None:
    rng = random.Random(seed)
    cost = step_cost(random_setup(rng), random_shape(rng))
    assert all(0 < op.ideal_s <= op.expected_s or not op.op.bytes for op in cost.ops)
    assert cost.ideal_s <= cost.device_s * (1 + 1e-12)
    assert cost.device_s <= cost.expected_s
    assert cost.ideal_s == pytest.approx(sum(op.ideal_s for op in cost.ops))
    assert {op.bound for op in cost.ops} <= set(BOUNDS)
    assert cost.bound in BOUNDS


def longer(rng: random.Random, shape: StepShape, what: str) -> StepShape:
    """More of one thing."""
    index, more = rng.randrange(len(shape)), rng.randint(1, 300)
    new, before = shape[index]
    if what == "batch":
        extra = rng.choice([(1, more), (more + 1, rng.randint(0, 300))])
        return (*shape, extra)
    if what == "context":
        changed = new, before + more
    else:  # a request that decodes stays one
        changed = (new + more, before) if new > 1 else (1, before)
    return (*shape[:index], changed, *shape[index + 1 :])


@pytest.mark.parametrize("what", ["tokens", "context", "batch"])
@pytest.mark.parametrize("seed", range(80))
def test_more_work_never_takes_less_time(seed: int, what: str) -> None:
    rng = random.Random(f"{what} {seed}")
    setup, shape = random_setup(rng), random_shape(rng)
    small, large = step_cost(setup, shape), step_cost(setup, longer(rng, shape, what))
    slack = 1 + 1e-12
    assert small.expected_s <= large.expected_s * slack, (shape, setup)
    assert small.ideal_s <= large.ideal_s * slack
    assert small.flops <= large.flops
    assert small.bytes <= large.bytes * slack


@pytest.mark.parametrize("seed", range(40))
def test_an_ideal_device_is_the_roofline(seed: int) -> None:
    """With all efficiencies at one and no latencies, expected is ideal but for prefill attention,
    where arithmetic and memory add up, and for weights that are unpacked first."""
    rng = random.Random(seed)
    setup = replace(random_setup(rng), calibration=ideal(), layout=Layout())
    setup = replace(setup, precision=replace(setup.precision, weights="plain"))
    shape = tuple((1, before) for _, before in random_shape(rng))
    cost = step_cost(setup, shape)
    assert cost.expected_s == pytest.approx(cost.ideal_s, rel=1e-9)


def ideal() -> Calibration:
    return Calibration(
        device_name="ideal",
        matmul={
            name: MatmulConstants(1.0, 1.0, 0.0)
            for name in ("bf16", "fp8", "fp32", "bf16-int8", "bf16-int4")
        }
        | {f"{a}-{b}": MatmulConstants(1.0, 1.0, 0.0) for a in A for b in ("int8", "int4")},
        attention={"bf16": AttentionConstants(1.0, 0.0, 1.0, 1.0, 0.0)},
        elementwise=StreamConstants(1.0, 0.0),
        sampling=StreamConstants(1.0, 0.0),
        messages=MessageConstants(1.0, 0.0),
    )


A = ("fp16", "fp32", "bf16")


# ------------------------------------------------------------------------ known figures


@pytest.mark.parametrize(
    ("name", "bandwidth", "tokens_per_s"),
    [("7B", 2e12, 142.9), ("70B", 2e12, 14.29), ("405B", 2e12, 2.47)],
)
def test_the_memory_wall(name: str, bandwidth: float, tokens_per_s: float) -> None:
    """Weights alone, read once a token, on a device with room for them."""
    weights = float(name[:-1]) * 1e9 * 2
    op = Op("weights", "matmul", 1, weights, weights, 0, m=1, n=1, k=1)
    wall = replace(ROUND, bandwidth=bandwidth, peak_flops={"bf16": 312e12})
    ideal_s = op_cost(op, wall, SHARES).ideal_s
    assert 1 / ideal_s == pytest.approx(tokens_per_s, rel=2e-3)
    assert weights / 312e12 == pytest.approx(ideal_s / 156, rel=0.01)  # 99.4 % waiting


def test_the_decode_floor_of_a_70b_model() -> None:
    """8-bit weights and 2.68 GB of cache on 3.35 TB/s: 21.7 ms; 16-bit weights: 42.6 ms."""
    spec, h100 = spec_of(LLAMA_70B), device("h100-sxm")
    for weights, floor_ms in (("fp8", 21.7), ("bf16", 42.6)):
        setup = Setup(spec, h100, precision=Precision.named(weights))
        cost = step_cost(setup, ((1, 8191),))
        # 70e9 and 140e9 bytes of weights in the text; the model has 68.5e9 of 8 bits, 2.1 of 16.
        assert cost.ideal_s * 1e3 == pytest.approx(floor_ms, rel=0.03)


def test_a_large_batch_is_bound_by_compute_and_a_small_one_by_memory() -> None:
    setup = Setup(spec_of(LLAMA_8B), device())
    assert step_cost(setup, ((1, 100),)).bound == "memory"
    assert step_cost(setup, ((4096, 0),)).bound == "compute"
    spread = Setup(spec_of(LLAMA_8B), device("rtx-4090"), Layout(tp=8))
    assert step_cost(spread, ((4096, 0),)).bound == "link"


def test_waiting_for_the_host_is_latency() -> None:
    setup = Setup(spec_of(LLAMA_8B), ROUND, calibration=SHARES)
    slow = replace(SHARES, host=HostConstants(c0_s=0.1, overlapped=False))
    waiting = step_cost(replace(setup, calibration=slow), ((1, 100),))
    assert step_cost(setup, ((1, 100),)).bound == "memory"
    assert waiting.bound == "latency"
    assert waiting.expected_s == pytest.approx(waiting.device_s + 0.1)
    assert sum(waiting.seconds_by_bound().values()) == pytest.approx(waiting.device_s)


def test_prefill_of_1k_tokens_of_a_70b_model() -> None:
    """143 TFLOP, 459 ms on an A100 at its peak (not the 100 ms that some texts name), if all tokens
    go all the way; for its first token all but one end at the last layer's attention."""
    setup = Setup(spec_of(LLAMA_70B), device("a100-80-sxm"))
    whole = step_cost(setup, ((1000, 0),), num_logits=1000)
    assert whole.flops == pytest.approx(141e12, rel=0.03)
    assert whole.ideal_s == pytest.approx(0.459, rel=0.03)
    cost = step_cost(setup, ((1000, 0),))
    wide, inner, vocabulary = 8192, 28672, 128256
    spared = 2 * 999 * (wide * wide + 3 * wide * inner + wide * vocabulary)
    assert whole.flops - cost.flops == spared


def test_tensor_parallel_decode_pays_for_latency_not_bytes() -> None:
    """160 messages a token of an 80-layer model: 0.05 us of bytes each, several us of latency."""
    setup = Setup(spec_of(LLAMA_70B), device("h100-sxm"), Layout(tp=4))
    (reduce,) = [c for c in step_cost(setup, ((1, 10),)).ops if c.op.kind == "all_reduce"]
    assert reduce.bound == "latency"
    assert reduce.ideal_s / reduce.op.count == pytest.approx(0.0546e-6, rel=0.01)
    assert 0.3e-3 < reduce.expected_s < 3e-3
    ops = step_cost(setup, ((8192, 0),)).ops
    large, last = [c for c in ops if c.op.kind == "all_reduce"]
    assert large.bound == "link"
    assert (large.op.count, last.op.count) == (159, 2)
    assert last.op.m == 1


# ------------------------------------------------------------------------ labels


def test_origins() -> None:
    setup = Setup(spec_of(LLAMA_8B), ROUND)
    assert step_cost(setup, ((1, 5),)).origin == "assumed"
    measured = replace(setup, calibration=SHARES)
    assert step_cost(measured, ((1, 5),)).origin == "calibrated"
    narrow = replace(SHARES, ranges={"matmul.m": (1, 64)})
    assert op_cost(MATMUL, ROUND, narrow).origin == "calibrated"
    assert op_cost(replace(MATMUL, m=65), ROUND, narrow).origin == "extrapolated"
    lonely = replace(SHARES, assumed_kinds=("all_reduce",))
    assert step_cost(Setup(setup.spec, ROUND, calibration=lonely), ((1, 5),)).origin == "calibrated"
    spread = Setup(setup.spec, ROUND, Layout(tp=2), calibration=lonely)
    assert step_cost(spread, ((1, 5),)).origin == "assumed"


def test_every_device_of_the_catalogue_has_a_price_for_a_step() -> None:
    spec = spec_of(LLAMA_8B)
    for one in catalogue().values():
        cost = step_cost(Setup(spec, one), ((1, 100), (64, 0)))
        assert 0 < cost.ideal_s < cost.expected_s < 30
        assert default_calibration(one).device_name == one.name
