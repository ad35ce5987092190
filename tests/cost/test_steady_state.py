"""Do the parts of a prediction fit together, and is what does not fit said so?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.cost.constants import HostConstants, default_calibration
from ridgeline.cost.hardware import Device, find_device
from ridgeline.cost.memory import Limits, memory_plan
from ridgeline.cost.pipeline import step_prices
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.cost.steady_state import SteadyState, batch_limit, steady_state
from ridgeline.cost.throughput import Load, throughput
from ridgeline.errors import ConfigError, DoesNotFit
from tests.cost.known_models import DEEPSEEK_V3, LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B

H100 = find_device("h100-sxm")
SETUPS = {
    "8B": Setup(LLAMA_3_8B, H100),
    "70B": Setup(LLAMA_3_70B, H100, Layout(tp=8), Precision.named("fp8")),
    "two stages": Setup(LLAMA_3_70B, H100, Layout(tp=4, pp=2)),
    "experts": Setup(DEEPSEEK_V3, find_device("b200"), Layout(tp=8, ep=8), Precision.named("fp8")),
    "CPU": Setup(LLAMA_3_8B, replace(find_device("xeon-8480"), memory_bytes=256 << 30)),
}


def found(name: str, batch: int = 16, num_input: int = 900, num_output: int = 150) -> SteadyState:
    return steady_state(SETUPS[name], batch=batch, num_input=num_input, num_output=num_output)


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("lengths", [(900, 150), (9_000, 2), (300, 1)])
def test_parts_sum_to_the_whole(name: str, batch: int, lengths: tuple[int, int]) -> None:
    one = found(name, batch, *lengths)
    assert sum(part.seconds for part in one.ttft_parts) == pytest.approx(one.ttft_s)
    assert sum(part.seconds for part in one.tpot_parts) == pytest.approx(one.tpot_s)
    assert all(part.seconds > -0.02 * one.ttft_s for part in one.ttft_parts)
    assert all(part.seconds > -0.02 * one.tpot_s for part in one.tpot_parts)
    assert sum(one.seconds_by_bound.values()) == pytest.approx(one.throughput.e2e_s)


@pytest.mark.parametrize("name", SETUPS)
def test_figures_are_those_of_the_pace_and_of_memory(name: str) -> None:
    one, setup = found(name), SETUPS[name]
    load = Load(16, 900, 150, one.throughput.load.max_num_batched_tokens)
    assert one.throughput == throughput(step_prices(setup), load, setup.layout.pp)
    assert one.decode.ideal_s <= one.decode.expected_s <= one.tpot_s * 1.001
    assert one.max_batch >= 16
    assert one.memory.max_sequences == 16
    assert one.memory.total_bytes <= one.memory.capacity_bytes
    slots = 64 if name == "CPU" else 256 * setup.layout.pp
    assert one.saturated.load.batch == min(one.max_batch, slots)
    assert one.saturated.tokens_per_s >= one.tokens_per_s


def test_shares_of_time_sum_to_all_of_it() -> None:
    one = found("70B")
    spent = one.input_s_per_token * 900 + one.output_s_per_token * 150
    assert spent * one.request_rate == pytest.approx(1)


def test_one_request_decodes_at_the_speed_of_memory_and_reads_at_that_of_arithmetic() -> None:
    one = found("8B", batch=1, num_input=8000, num_output=2)
    assert one.decode.bound == "memory"
    assert one.prefill.bound == "compute"
    assert one.bound == "compute"  # nearly all of the time is the prompt's
    assert found("8B", batch=1, num_input=10, num_output=500).bound == "memory"


def test_host_time_that_nothing_hides_is_a_part_and_can_bind() -> None:
    slow = replace(default_calibration(H100), host=HostConstants(c0_s=0.05, overlapped=False))
    one = steady_state(
        replace(SETUPS["8B"], calibration=slow), batch=4, num_input=100, num_output=50
    )
    assert one.bound == "host"
    host = next(part for part in one.tpot_parts if part.what == "host")
    assert host.seconds == pytest.approx(0.05)


def test_stages_lower_the_share_of_each_and_not_the_wait_for_all() -> None:
    """Half the requests in each of two stages' steps: less per step, twice as many steps."""
    two = found("two stages", batch=64)
    alone = throughput(step_prices(SETUPS["two stages"]), Load(32, 900, 150))
    assert two.tpot_s == pytest.approx(alone.tpot_s)
    assert two.request_rate == pytest.approx(2 * alone.request_rate)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    setup = Setup(LLAMA_2_7B, find_device("rtx-4090"), precision=Precision.named("fp16"))
    limits = Limits(2000, 1, 8192)
    most = batch_limit(setup, limits)
    assert 1 < most < 20
    steady_state(setup, batch=most, num_input=1800, num_output=200)
    with pytest.raises(DoesNotFit) as error:
        steady_state(setup, batch=most + 1, num_input=1800, num_output=200)
    assert error.value.changes[0] == f"batch {most}, the most that fit at once"
    assert 1 <= len(error.value.changes) <= 3
    cache = dict(error.value.items)["KV cache"]
    assert cache > (most + 1) * 2000 * 524_288


def test_the_largest_batch_is_that_of_memory_or_of_a_step() -> None:
    """4096 was once a limit that nobody had asked for."""
    setup = Setup(LLAMA_3_8B, find_device("m3-ultra"), precision=Precision.named("int4", "int8"))
    roomy = steady_state(setup, batch=1, num_input=512, num_output=128)
    assert (roomy.max_batch > 4096, roomy.batch_limited_by) == (True, "memory")
    steady_state(setup, batch=roomy.max_batch, num_input=512, num_output=128)
    with pytest.raises(DoesNotFit):
        steady_state(setup, batch=roomy.max_batch + 1, num_input=512, num_output=128)
    step = steady_state(setup, batch=1, num_input=512, num_output=128, max_num_batched_tokens=100)
    assert (step.max_batch, step.batch_limited_by) == (100, "max_num_batched_tokens")


def test_a_model_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(DoesNotFit) as error:
        steady_state(Setup(LLAMA_3_70B, H100), batch=1, num_input=1000, num_output=100)
    assert len(error.value.changes) == 3
    assert dict(error.value.items)["feed-forward"] > 100e9
    assert not any(change.startswith("batch") for change in error.value.changes)


def test_the_context_of_the_model_is_the_limit() -> None:
    steady_state(SETUPS["8B"], batch=1, num_input=131_000, num_output=72)
    with pytest.raises(ConfigError, match="context of 131072"):
        steady_state(SETUPS["8B"], batch=1, num_input=131_000, num_output=73)


@pytest.mark.parametrize("changed", ["input", "output", "batch"])
def test_more_work_never_takes_less_time(changed: str) -> None:
    base = {"batch": 4, "input": 400, "output": 100}
    times = []
    for factor in (1, 2, 4, 8):
        load = base | {changed: base[changed] * factor}
        one = found("8B", load["batch"], load["input"], load["output"])
        times.append((one.throughput.e2e_s, one.memory.item("KV cache").bytes))
    assert times == sorted(times)


def test_memory_is_planned_for_all_requests_at_once() -> None:
    setup = SETUPS["8B"]
    plan = memory_plan(
        setup, max_model_len=1050, max_num_seqs=16, max_num_batched_tokens=8192, min_sequences=16
    )
    assert plan == found("8B").memory


def device_with(bandwidth: float) -> Device:
    return replace(H100, bandwidth=bandwidth)


def test_twice_the_bandwidth_nearly_halves_the_time_of_one_request() -> None:
    slow, fast = (
        steady_state(Setup(LLAMA_3_8B, device_with(rate)), batch=1, num_input=10, num_output=200)
        for rate in (1e12, 2e12)
    )
    assert 1.7 < slow.tpot_s / fast.tpot_s < 2
