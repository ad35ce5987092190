"""Does the fit find constants that are there, in spite of noise and of a few wild points?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from ridgeline.architectures import read_spec
from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    MatmulConstants,
    StreamConstants,
    default_calibration,
)
from ridgeline.cost.execution_mode import is_captured
from ridgeline.cost.fit import (
    Fit,
    Point,
    errors_by_class,
    fit,
    predict,
    ranges,
    relative_error,
    split,
    with_values,
)
from ridgeline.cost.hardware import Device, find_device
from ridgeline.cost.least_squares import minimise, soft_l1
from ridgeline.cost.ops import step_ops
from ridgeline.cost.setup import Precision
from ridgeline.cost.step_features import step_features
from ridgeline.step import StepShape

DEVICE = find_device("a100-80-sxm")
SPEC = read_spec(
    {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
)


def truth(host: HostConstants) -> Calibration:
    return replace(
        default_calibration(DEVICE),
        matmul={"bf16": MatmulConstants(0.8, 0.7, 6e-6, q=2.5, k0=150.0, e_v=0.85, k_m=30.0)},
        attention={
            "bf16": AttentionConstants(
                0.65, 2e-5, 0.5, 0.6, 3e-5, decode_e_c=0.5, mixed_prefill=1.1, mixed_decode=1.6
            )
        },
        streams={
            f"{name} bf16": StreamConstants(share, seconds)
            for name, share, seconds in (
                ("norm", 0.8, 5e-6),
                ("rope_and_cache", 0.5, 9e-6),
                ("activation", 0.7, 3e-6),
                ("embedding", 0.9, 2e-6),
                ("sampling", 0.6, 4e-5),
                ("final_norm", 0.8, 5e-6),
            )
        },
        origin="calibrated",
        host=host,
    )


def decodes(rows: int, context: int) -> StepShape:
    return ((1, context - 1),) * rows


SHAPES: dict[str, list[StepShape]] = {
    "decode_attention": [decodes(b, s) for b in (1, 8, 32, 128) for s in (256, 1024, 4096)],
    "prefill_attention": [((n, before),) for n in (64, 256, 1024, 4096) for before in (0, 2048)],
    "mixed_attention": [((n, 0), *decodes(b, 700)) for n in (64, 512, 2048) for b in (8, 64)],
    "decode_step": [decodes(b, s) for b in (1, 3, 9, 30, 100) for s in (100, 600, 3000)],
    "prefill_step": [((n, 0),) for n in (20, 50, 150, 400, 900, 2000, 5000)],
    "mixed_step": [((n, 0), *decodes(b, 500)) for n in (100, 700) for b in (4, 40)],
}


def points_of(calibration: Calibration, noise: float, rng: Random) -> list[Point]:
    """What a machine with these constants would be seen to do."""
    found: list[Point] = []
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512, 2048):
        for op in step_ops(SPEC, decodes(tokens, 1), precision=Precision()):
            if not op.kind.endswith("attention") and op.name != "final_norm":
                one = (replace(op, count=1),)
                found.append(Point(op.kind, "bf16", one, 0.0, label=f"{op.name} {tokens}"))
    for what, shapes in SHAPES.items():
        for number, shape in enumerate(shapes):
            ops = step_ops(SPEC, shape, precision=Precision())
            if what.endswith("attention"):
                ops = tuple(replace(op, count=1) for op in ops if op.kind.endswith("attention"))
            rows = len(shape) if what.endswith("step") else None
            captured = is_captured(calibration.host, step_features((), shape))
            is_one = captured and rows is not None
            found.append(Point(what, "bf16", ops, 0.0, rows, f"shape {number}", is_one))
    return [
        replace(p, seconds=predict(p, DEVICE, calibration) * math.exp(rng.gauss(0, noise)))
        for p in found
    ]


def fitted(host: HostConstants, noise: float, seed: int, wild: float = 1.0) -> tuple[Fit, Device]:
    rng = Random(seed)
    points = points_of(truth(host), noise, rng)
    points = [replace(p, seconds=p.seconds * wild) if rng.random() < 0.06 else p for p in points]
    return fit(points, DEVICE, replace(host, c0_s=5e-5, c1_s=2e-6, per_launch_s=0.0)), DEVICE


def _host_s(host: HostConstants) -> float:
    """Of a decode step with one request."""
    launches = sum(op.count for op in step_ops(SPEC, decodes(1, 100), precision=Precision()))
    return host.c0_s + host.c1_s + launches * host.per_launch_s


@pytest.mark.parametrize(
    "host",
    [
        HostConstants(8e-4, 3e-5, 0.0, overlapped=False),
        HostConstants(3e-4, 2e-5, 7e-6, overlapped=True),
    ],
    ids=["serial", "overlapped"],
)
def test_constants_that_are_there_are_found(host: HostConstants) -> None:
    result, _ = fitted(host, noise=0.0, seed=1)
    for name, error in result.errors.items():
        assert error.median < 0.02, (name, error)
    found, wanted = result.calibration, truth(host)
    assert found.matmul["bf16"].e_c == pytest.approx(wanted.matmul["bf16"].e_c, rel=0.05)
    assert found.matmul["bf16"].e_v == pytest.approx(0.85, rel=0.05)
    assert found.attention["bf16"].decode_e_m == pytest.approx(0.65, rel=0.05)
    assert found.attention["bf16"].mixed_decode == pytest.approx(1.6, rel=0.1)
    assert found.streams["rope_and_cache bf16"].t0_s == pytest.approx(9e-6, rel=0.1)
    assert found.streams["final_norm bf16"] == found.streams["norm bf16"]
    assert found.host.overlapped is host.overlapped
    if host.overlapped:  # all steps of one model have as many launches: only the sum shows
        assert _host_s(found.host) == pytest.approx(_host_s(host), rel=0.1)
    else:
        assert found.host.c0_s == pytest.approx(host.c0_s, rel=0.1)
        assert found.host.c1_s == pytest.approx(host.c1_s, rel=0.1)


def test_what_capturing_leaves_of_starting_a_kernel_is_found() -> None:
    host = HostConstants(
        2e-4, 1e-6, 7e-6, captured_tokens=512, captured_prompt_tokens=1000, captured_t0=0.12
    )
    points = points_of(truth(host), 0.0, Random(1))
    assert sum(point.captured for point in points) > 15
    seen = HostConstants(5e-5, 1e-6, overlapped=True)
    result = fit(points, DEVICE, seen)
    assert result.calibration.host.captured_t0 == pytest.approx(0.12, rel=0.25)
    for name, error in result.errors.items():
        assert error.median < 0.03, (name, error)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_wild_points_do_not_lead_astray(seed: int) -> None:
    print(f"seed {seed}")
    host = HostConstants(8e-4, 3e-5, 0.0, overlapped=False)
    result, _ = fitted(host, noise=0.04, seed=seed, wild=3.0)
    clean = points_of(truth(host), 0.0, Random(0))
    for name, error in errors_by_class(clean, DEVICE, result.calibration).items():
        if error.count >= 12:  # of fewer points two wild ones may be a third
            assert error.median < 0.12, (name, error)


def test_a_record_of_the_fit_reads_back() -> None:
    result, _ = fitted(HostConstants(8e-4, 3e-5, overlapped=False), noise=0.02, seed=5)
    again = Calibration.from_json(result.calibration.to_json())
    assert again == result.calibration
    point = result.held_out[0]
    assert predict(point, DEVICE, again) == predict(point, DEVICE, result.calibration)
    assert again.held_out[f"{point.what} bf16"] == result.errors[f"{point.what} bf16"].median


# ---------------------------------------------------------------------- keeping points out


def test_a_fifth_of_every_class_is_kept_out_whatever_else_there_is() -> None:
    points = points_of(truth(HostConstants()), 0.0, Random(0))
    kept = split(points)[1]
    for what in {point.what for point in points}:
        all_of = [point for point in points if point.what == what]
        assert len([point for point in kept if point.what == what]) == len(all_of) // 5
    backwards = split(points[::-1])[1]
    assert {(p.what, p.label) for p in backwards} == {(p.what, p.label) for p in kept}
    assert len(split(points)[0]) + len(kept) == len(points)


def test_kept_out_points_do_not_move_the_fit() -> None:
    host = HostConstants(8e-4, 3e-5, 0.0, overlapped=False)
    points = points_of(truth(host), 0.0, Random(0))
    kept = {id(point) for point in split(points)[1]}
    moved = [replace(p, seconds=p.seconds * 5) if id(p) in kept else p for p in points]
    honest, lied = fit(points, DEVICE, host), fit(moved, DEVICE, host)
    assert honest.calibration.matmul == lied.calibration.matmul
    assert honest.calibration.host == lied.calibration.host
    assert lied.errors["matmul bf16"].median == pytest.approx(0.8, abs=0.02)


def test_ranges_span_what_was_measured() -> None:
    points = points_of(truth(HostConstants()), 0.0, Random(0))
    found = ranges(points)
    assert found["matmul.m"] == (1, 5000)
    assert found["decode_attention.m"] == (1, 128)
    assert found["matmul.n"][1] == 32000
    result = fit(points, DEVICE, HostConstants(8e-4, 3e-5, overlapped=False))
    assert result.calibration.ranges == found
    assert set(result.calibration.assumed_kinds) == {
        "all_reduce",
        "all_gather",
        "all_to_all",
        "point_to_point",
    }


def test_classes_without_points_stay_where_they_started() -> None:
    points = [p for p in points_of(truth(HostConstants()), 0.0, Random(0)) if p.what == "matmul"]
    result = fit(points, DEVICE, HostConstants(8e-4, 3e-5, overlapped=False))
    assert set(result.errors) == {"matmul bf16"}
    assert result.errors["matmul bf16"].median < 0.02
    assert "decode_attention" not in {kind.split(".")[0] for kind in result.calibration.ranges}


def test_errors_are_relative_and_signed() -> None:
    point = points_of(truth(HostConstants()), 0.0, Random(0))[0]
    calibration = truth(HostConstants())
    twice = replace(point, seconds=point.seconds * 2)
    assert relative_error(point, DEVICE, calibration) == pytest.approx(0)
    assert relative_error(twice, DEVICE, calibration) == pytest.approx(-0.5)
    errors = errors_by_class([point, twice], DEVICE, calibration)
    assert errors[f"{point.what} bf16"].median == pytest.approx(0.25)


def test_one_row_is_never_slower_than_two() -> None:
    start = truth(HostConstants())
    turned = with_values(start, {("matmul", "bf16", "e_m"): 0.9, ("matmul", "bf16", "e_v"): 0.2})
    assert turned.matmul["bf16"].e_v == 0.9
    assert start.matmul["bf16"].e_v == 0.85


# ---------------------------------------------------------------------- the search itself


def test_a_line_is_found_through_outliers() -> None:
    xs = [i / 10 for i in range(40)]
    ys = [2.0 + 3.0 * x + (8.0 if i % 10 == 3 else 0.0) for i, x in enumerate(xs)]

    def residuals(p: Sequence[float]) -> list[float]:
        a, b = p
        return [a + b * x - y for x, y in zip(xs, ys, strict=True)]

    a, b = minimise(residuals, [0.0, 0.0], scale=0.1, rounds=200)
    assert (a, b) == pytest.approx((2.0, 3.0), abs=0.05)


def test_the_loss_never_rises_and_useless_parameters_do_no_harm() -> None:
    def residuals(p: Sequence[float]) -> list[float]:
        x, y, _ = p
        return [10 * (y - x * x), 1 - x]  # Rosenbrock's valley, and a parameter without effect

    start = [-1.2, 1.0, 5.0]
    found = minimise(residuals, start, scale=10.0, rounds=300)
    assert soft_l1(residuals(found), 10.0) < 1e-6 < soft_l1(residuals(start), 10.0)
    assert found[:2] == pytest.approx([1.0, 1.0], abs=1e-2)


def test_soft_l1_is_square_near_and_straight_far() -> None:
    assert soft_l1([0.01], 1.0) == pytest.approx(0.0001, rel=1e-3)
    assert soft_l1([101.0], 1.0) - soft_l1([100.0], 1.0) == pytest.approx(2.0, rel=1e-2)
