"""Levels, errors, sizes and speeds of weight formats, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from ridgeline.architectures.counts import weight_bytes
from ridgeline.errors import RequestFault
from ridgeline.lab.machine import spec_of
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.quantization import BATCHES, PAGE, Drawing, Inputs, answer
from ridgeline.quantization.rounding_error import levels, relative_rms, rounded, signal_to_noise_db


def ask(**values: object) -> Answer[Drawing]:
    inputs = read_inputs(PAGE, values)
    assert isinstance(inputs, Inputs)
    return answer(inputs)


def figure(found: Answer[Drawing], name: str) -> float:
    return next(one.value for one in found.figures if name in one.name)


def test_the_textbook_row_is_rounded_as_it_is_by_hand() -> None:
    table = next(one for one in ask().tables if one.title.startswith("By hand"))
    assert [row[2] for row in table.rows] == [1, -7, 4, -2]
    assert [row[3] for row in table.rows] == [0.1186, -0.83, 0.4743, -0.2371]
    assert max(float(row[4]) for row in table.rows) == 0.0271


def test_levels_of_four_bits_are_even_steps_of_an_eighth_of_the_largest() -> None:
    """The largest is code -8; the scale is stored in bfloat16, in which 1/8 is exact."""
    row_I = torch.linspace(-0.9, 1.0, 128)
    found = levels(row_I, "int4")
    assert torch.equal(found, torch.arange(-7, 9) / 8)


@pytest.mark.parametrize("row", [0, 5, 60])
def test_the_sentence_counts_the_levels_from_the_smallest_weight_to_the_largest(row: int) -> None:
    """The largest magnitude is code -8; the other end is as many eighths of it away, at most 7."""
    found = ask(row=row)
    low, high = min(found.drawing.weights), max(found.drawing.weights)
    near, far = sorted([-low, high])
    count = 8 + 1 + min(7, round(8 * near / far))
    assert f" {count} levels (4 bits have 16 codes)" in found.sentence


def test_levels_of_eight_bit_floats_are_those_of_e4m3() -> None:
    """Independent of any library: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity;
    the largest, 448, is the largest weight."""
    normal = {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0}
    every = sorted(normal | {m / 8 * 2.0**-6 for m in range(8)})
    row_I = torch.linspace(-1.0, 1.0, 384)
    found = levels(row_I, "fp8")
    positive = found[found >= 0] * 448
    for level in positive.tolist():
        assert min(abs(level - one) / max(one, 2.0**-9) for one in every) < 1e-5
    assert positive.numel() >= 125  # of 127: two of the smallest may lie between two of the sweep


def test_rounding_errors_are_those_of_even_steps() -> None:
    """A weight is off by up to half a step, evenly: step / sqrt(12), 6.02 dB a bit."""
    weight_OI = torch.rand(64, 1024, generator=torch.Generator().manual_seed(1)) * 2 - 1
    weight_OI[:, 0] = 1.0  # the scale of a row is 1/127 exactly
    error = float((rounded(weight_OI, "int8") - weight_OI).pow(2).mean().sqrt())
    assert error == pytest.approx(1 / 127 / 12**0.5, rel=0.02)
    share = relative_rms(weight_OI, rounded(weight_OI, "int8"))
    assert signal_to_noise_db(share / 2) - signal_to_noise_db(share) == pytest.approx(
        6.02, abs=0.01
    )


def test_sizes_are_the_published_ones() -> None:
    """70 GB in 8 bits and 36.1 to 36.4 GB in 4 with a 16-bit scale for 128 weights, of 70 billion
    weights; this model has 0.55 billion more, 0.52 in a vocabulary of 8 bits."""
    spec = spec_of("llama-2-70b")
    assert weight_bytes(spec, 2) / 1e9 == pytest.approx(137.95, abs=0.01)  # 68.98 billion
    assert weight_bytes(spec, 2, "int8") / 1e9 == pytest.approx(69, abs=0.1)
    matrices = 68.45e9 * 4.125 / 8 + 0.524e9
    assert weight_bytes(spec, 2, "int4") == pytest.approx(matrices, rel=0.002)


def test_an_outlier_spoils_its_neighbours_and_smaller_groups_save_most_of_them() -> None:
    plain, spoiled = ask(), ask(outlier=8.0)
    assert figure(spoiled, "with this scale") > 2 * figure(plain, "with this scale")
    assert figure(spoiled, "whole matrix") == figure(plain, "whole matrix")
    assert len(ask(outlier=8.0, format="int4-g32").drawing.weights) == 32
    drawing = spoiled.drawing
    largest = max(range(len(drawing.weights)), key=lambda i: abs(drawing.weights[i]))
    assert drawing.outlier == largest


def test_every_rounded_weight_is_a_level() -> None:
    for name in ("int4", "int4-asym", "int8"):
        drawing = ask(format=name).drawing
        assert set(drawing.rounded) <= set(drawing.levels)


def test_int4_wins_alone_and_loses_to_fp8_from_the_crossover_on() -> None:
    found = ask().drawing
    speeds = {one.format: one.tokens_per_s for one in found.curves}
    assert speeds["int4"][0] > speeds["fp8"][0] > speeds["plain"][0]
    for batch, int4, fp8 in zip(BATCHES, speeds["int4"], speeds["fp8"], strict=True):
        assert (int4 < fp8) == (batch >= found.crossover > 0)
    assert ask(device="a100-80-sxm").drawing.crossover == 0  # no 8-bit floats: nothing to lose to


def test_choices_are_named() -> None:
    with pytest.raises(RequestFault, match="choose one of"):
        ask(format="int3")
    with pytest.raises(RequestFault, match="between 0 and 5"):
        ask(layer=6)
    for preset in PAGE.presets:
        assert ask(**preset.inputs).sentence
