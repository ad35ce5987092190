"""Is the speedup of drafting what the formulas, a simulation and the step's price say?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from ridgeline.architectures.spec import AttentionSpec, ModelSpec, RopeSpec
from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    MatmulConstants,
    MessageConstants,
    default_calibration,
)
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.cost.step_features import StepFeatures, step_features
from ridgeline.errors import ConfigError
from ridgeline.speculation.price import (
    DeviceLookup,
    Drafter,
    DraftPrices,
    DraftSteps,
    HostLookup,
    expected_curve,
    expected_tokens,
    head_spec,
    simple_speedup,
)
from ridgeline.step import StepShape
from tests.cost.known_models import LLAMA_3_1B, LLAMA_3_70B
from tests.speculation.acceptance_law import (
    acceptance_rate,
    after_rejection,
    best_simple,
    emitted,
)

PLAIN = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, rope=RopeSpec())


@dataclass(frozen=True, slots=True)
class Line:
    """A step priced as weights + a share for each row, each key read and each row of logits."""

    weights_s: float
    row_s: float = 0.0
    key_s: float = 0.0
    logits_s: float = 0.0

    def features(self, shape: StepShape) -> StepFeatures:
        return step_features((PLAIN,), shape)

    def seconds_of(
        self,
        totals: StepFeatures,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float:
        keys = totals.attention[0].decode_keys + totals.attention[0].prefill_keys
        logits = totals.num_requests if num_logits is None else num_logits
        rows = totals.num_tokens
        kernels_s = self.weights_s + rows * self.row_s + keys * self.key_s
        return max(host_s, drafting_s + kernels_s + logits * self.logits_s)


@dataclass(frozen=True, slots=True)
class Drafts(Drafter):
    step_s: float
    key_s: float = 0.0

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return num_drafts * (self.step_s + batch * context * self.key_s)


def test_the_mean_is_that_of_many_runs() -> None:
    rng = Random(5)
    for rate, drafts in ((0.3, 2), (0.7, 5), (0.9, 8)):
        total = 0
        for _ in range(20_000):
            accepted = 0
            while accepted < drafts and rng.random() < rate:
                accepted += 1
            total += accepted + 1
        assert total / 20_000 == pytest.approx(expected_tokens(rate, drafts), rel=0.02), "seed 5"


def test_bounds_of_the_mean() -> None:
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.6, 0) == 1
    assert expected_tokens(0.7, 5) - 1 < 0.7 * 5  # a miss ends the run
    assert expected_curve(0.6, 2) == pytest.approx((1, 1.6, 1.96))
    assert expected_tokens(0.999999, 5) == pytest.approx(6, rel=1e-4)


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        expected_tokens(rate, 3)


def test_negative_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        expected_tokens(0.5, -1)


def test_what_is_emitted_follows_the_target() -> None:
    target, draft = (0.5, 0.3, 0.2, 0.0), (0.1, 0.6, 0.1, 0.2)
    assert emitted(target, draft) == pytest.approx(target)
    assert after_rejection(target, draft) == pytest.approx((0.8, 0.0, 0.2, 0.0))
    assert acceptance_rate(target, draft) == pytest.approx(0.5)
    assert acceptance_rate(target, target) == pytest.approx(1)
    assert emitted(target, target) == pytest.approx(target)


def test_the_simple_form_is_the_full_one_where_checking_is_free() -> None:
    prices = DraftPrices(Line(1.0), Drafts(0.05))
    for k, tokens in enumerate(expected_curve(0.8, 11)):
        assert prices.speedup(1, 100, k, tokens) == pytest.approx(simple_speedup(0.8, k, 0.05))
    assert prices.best(1, 100, expected_curve(0.8)) == pytest.approx(best_simple(0.8, 0.05))


def test_no_draft_is_best_when_none_pays() -> None:
    assert DraftPrices(Line(1.0), Drafts(0.5)).best(1, 100, expected_curve(0.1)) == (0, 1.0)
    assert DraftPrices(Line(1.0), Drafts(0.05)).best(1, 100, expected_curve(0.8, 3))[0] == 3


def test_checking_prices_every_row_and_its_logits() -> None:
    target = Line(1.0, row_s=0.01, logits_s=0.1)
    prices = DraftPrices(target, HostLookup(0.001))
    expected = 1.0 + 4 * 3 * 0.01 + 4 * 3 * 0.1 + 4 * 0.001
    assert prices.seconds(4, 100, 2) == pytest.approx(expected)
    assert prices.seconds(4, 100, 0) == pytest.approx(1.0 + 4 * 0.01 + 4 * 0.1)
    assert HostLookup().seconds(8, 100, 0) == 0


def test_rows_that_cost_arithmetic_end_the_gain_at_large_batches() -> None:
    target = Line(1.0, row_s=0.01)
    prices, curve = DraftPrices(target, Drafts(0.02)), expected_curve(0.7)
    gains = [prices.best(batch, 10, curve)[1] for batch in (1, 16, 64, 256)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
    assert gains[-1] < 1.2


def test_a_long_context_brings_the_gain_back_for_a_light_drafter() -> None:
    """The check reads the cache once for all its rows; a drafter with a cache reads its own."""
    target = Line(1.0, row_s=0.01, key_s=1e-5)
    curve = (1, 1.8, 2.3, 2.75, 3.06)
    light = DraftPrices(target, Drafts(0.02))
    heavy = DraftPrices(target, Drafts(0.02, key_s=1e-5))
    assert light.best(128, 16_000, curve)[1] > light.best(128, 100, curve)[1]
    assert heavy.best(128, 16_000, curve)[1] < light.best(128, 16_000, curve)[1]


def h100_in_fp8() -> Calibration:
    """Constants fitted to public tables of kernel times (vLLM on H100, eager launches)."""
    device = find_device("h100-sxm")
    return replace(
        default_calibration(device),
        matmul={
            "fp8": MatmulConstants(0.833, 0.832, 6.8e-6, q=4.3, k0=427, q_b=3.2),
            "bf16": MatmulConstants(0.859, 0.924, 5.2e-6, q=3.9, k0=118),
        },
        attention={
            "bf16": AttentionConstants(
                decode_e_m=0.81,
                decode_t0_s=12.5e-6,
                prefill_e_c=0.69,
                prefill_e_m=0.81,
                prefill_t0_s=12.5e-6,
                mixed_decode=1.8,
            )
        },
        messages=MessageConstants(0.78, 5.4e-6),
        host=HostConstants(),
        origin="calibrated",
    )


def priced(spec: ModelSpec, tp: int) -> Pricer:
    device = find_device("h100-sxm")
    return Pricer(Setup(spec, device, Layout(tp=tp), Precision.named("fp8"), h100_in_fp8()))


@pytest.mark.parametrize(
    ("context", "batch", "speedup"),
    [
        (1024, 1, 1.98),
        (1024, 16, 1.76),
        (1024, 64, 1.41),
        (1024, 128, 1.21),
        (1024, 256, 1.06),
        (16_384, 1, 1.91),
        (16_384, 16, 1.37),
        (16_384, 64, 1.12),
    ],
)
def test_a_small_model_that_drafts_for_a_70b(context: int, batch: int, speedup: float) -> None:
    """A 1B on one device for a 70B on eight, acceptance 0.8: what an independent model of the same
    hardware said. The draft reads a cache of its own, so a long context takes the gain away."""
    prices = DraftPrices(priced(LLAMA_3_70B, 8), DraftSteps(priced(LLAMA_3_1B, 1)))
    assert prices.best(batch, context, expected_curve(0.8))[1] == pytest.approx(speedup, rel=0.04)


@pytest.mark.parametrize(
    ("context", "batch", "speedup"),
    [
        (1024, 1, 2.76),
        (1024, 32, 2.07),
        (1024, 128, 1.45),
        (1024, 512, 1.13),
        (16_384, 1, 2.77),
        (16_384, 128, 2.11),
        (16_384, 512, 1.98),
    ],
)
def test_a_head_that_drafts_for_a_70b(context: int, batch: int, speedup: float) -> None:
    """One more layer, with a measured acceptance curve: at a long context it goes on paying."""
    curve = (1, 1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51)
    head = DraftSteps(priced(head_spec(LLAMA_3_70B), 8))
    assert DraftPrices(priced(LLAMA_3_70B, 8), head).best(batch, context, curve)[
        1
    ] == pytest.approx(speedup, rel=0.12)


def test_the_host_works_more_where_drafts_are_checked() -> None:
    device = find_device("h200-sxm")
    host = HostConstants(1e-4, 1e-6, captured_tokens=512, check_request_s=4e-6)
    calibration = replace(default_calibration(device), host=host)
    pricer = Pricer(Setup(LLAMA_3_1B, device, calibration=calibration))
    plain, verified = (pricer.cost(((new, 100),) * 128, 128 * new) for new in (1, 2))
    assert plain.host_s == pytest.approx(1e-4 + 128e-6)
    assert verified.host_s == pytest.approx(1e-4 + 5 * 128e-6)
    prices = DraftPrices(pricer, Drafter())
    assert prices.seconds(128, 100, 1) == pytest.approx(verified.expected_s)
    light = replace(calibration, host=replace(host, check_request_s=0.0))
    prompts = ((40, 0),) * 128  # they have no drafts
    without = Pricer(Setup(LLAMA_3_1B, device, calibration=light)).cost(prompts, 128)
    assert pricer.cost(prompts, 128).host_s == without.host_s


def test_looking_drafts_up_takes_as_long_where_none_is_checked() -> None:
    prices = DraftPrices(Line(1.0), DeviceLookup(0.25))
    assert prices.plain_seconds(1, 64) == 1.0
    assert prices.seconds(1, 64, 0) == 1.25
    assert prices.seconds(1, 64, 4) == 1.25


def test_what_the_host_does_for_drafts_counts_where_it_is_the_longer_part() -> None:
    prices = DraftPrices(Line(1.0), Drafter(), choice_s=0.9, token_s=0.1)
    assert prices.seconds(1, 64, 4) == prices.plain_seconds(1, 64) == 1.0
    assert prices.seconds(1, 64, 4, tokens=4.0) == pytest.approx(0.9 + 0.3)
    assert prices.seconds(2, 64, 4, tokens=4.0) == pytest.approx(0.9 + 0.6)
    assert prices.seconds(1, 64, 4, tokens=1.0) == prices.plain_seconds(1, 64) == 1.0
