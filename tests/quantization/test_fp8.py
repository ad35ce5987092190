"""e4m3 weights: rounded by rows, in pieces, multiplied as announced, and as large as announced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.counts import layer_scale_bytes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.fp8_linear import fp8_product
from ridgeline.kernels.quantize_rows import (
    E4M3,
    QuantizedRows,
    has_e4m3,
    quantize_rows_reference,
)
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.small_linear import Fusion, InputNorm
from ridgeline.quantization import Parameters, fp8, open_weight_format
from ridgeline.quantization.fp8 import Fp8Weights
from tests.architectures.configs import config
from tests.kernels.references import silu_mul_reference
from tests.tiny_model import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def finished(weight: torch.Tensor) -> Parameters:
    weights = Fp8Weights()
    outputs, inputs = weight.shape
    parameters = weights.parameters(outputs, inputs, weight.dtype, weight.device)
    parameters["weight"].copy_(weight)
    return weights.finish(parameters)


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    weight = (noise(30, 70) * 10.0 ** noise(30, 1, seed=1)).to(dtype)
    kept = finished(weight)
    assert {name: t.dtype for name, t in kept.items()} == {"codes": E4M3, "scale": torch.float32}
    apart = (Fp8Weights().dequantize(kept) - weight.float()).abs()
    bound = torch.maximum(weight.float().abs() / 16, 2.0**-10 * kept["scale"][:, None])
    assert bool((apart <= 1.0001 * bound).all())
    assert 0.02 < (apart.norm() / weight.float().norm()) < 0.03


def test_rounding_goes_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, sizes = noise(37, 50), []

    def watched(piece: torch.Tensor) -> QuantizedRows:
        sizes.append(piece.numel())
        return quantize_rows_reference(piece)

    whole = finished(weight)
    monkeypatch.setattr(fp8, "quantize_rows_reference", watched)
    monkeypatch.setattr(fp8, "PIECE_NUMBERS", 220)
    parts = finished(weight)
    assert sizes == [200] * 9 + [50]
    assert torch.equal(parts["codes"].float(), whole["codes"].float())
    assert torch.equal(parts["scale"], whole["scale"])


def test_a_row_of_zeros_is_safe() -> None:
    weight = noise(4, 16)
    weight[2] = 0.0
    kept = finished(weight)
    assert bool((kept["scale"] > 0).all())
    assert Fp8Weights().dequantize(kept)[2].abs().max() == 0
    assert bool(Fp8Weights().linear(noise(3, 16), kept, None).isfinite().all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(broken: float) -> None:
    weight = noise(6, 16)
    weight[3, 5] = weight[5, 0] = broken
    with pytest.raises(ConfigError, match=r"6 x 16 weights to fp8: row 3 \(2 rows in all\)"):
        finished(weight)


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_linear(rows: int, dtype: torch.dtype) -> None:
    """One row of x is not rounded on any device, several are where there are products in e4m3."""
    weights, kept = Fp8Weights(), finished(noise(48, 64).to(dtype))
    bias, x = noise(48, seed=1).to(dtype), noise(64, rows, seed=2).to(dtype).T  # not contiguous
    is_rounded = rows > 1 and has_e4m3(DEVICE) and dtype != torch.float32
    bound = 0.04 if is_rounded else 4 * torch.finfo(dtype).eps
    for addend in (None, bias):
        exact = x.float() @ weights.dequantize(kept).T
        exact += 0 if addend is None else addend.float()
        got = weights.linear(x, kept, addend)
        assert got.dtype == dtype
        assert (got.float() - exact).norm() <= bound * exact.norm()
    assert weights.linear(x[:0], kept, bias).shape == (0, 48)


def multiplies_e4m3() -> bool:
    """A GPU with e4m3, or a CPU for which this torch scales rows (not all of 2.11 do)."""
    if DEVICE.type == "cuda":
        return has_e4m3(DEVICE)
    small = finished(noise(16, 16))
    try:
        fp8_product(
            quantize_rows_reference(noise(16, 16)), Fp8Weights().matrix(small), torch.float32
        )
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not multiplies_e4m3(), reason="needs products of e4m3 with scales of rows")
def test_rounded_inputs_are_off_by_a_sixteenth_of_each_product_at_most() -> None:
    """What many rows on a GPU get: sum of |x w| / 16, and in the mean 2.6 % of the result."""
    weights, kept, x = Fp8Weights(), finished(noise(64, 256)), noise(40, 256, seed=2)
    exact, w = x @ weights.dequantize(kept).T, weights.dequantize(kept)
    got = fp8_product(quantize_rows_reference(x), weights.matrix(kept), torch.float32)
    bound = x.abs() @ w.abs().T / 16 + 2.0**-8 * exact.abs() + 0.01
    assert bool(((got - exact).abs() <= bound).all())
    assert 0.01 < (got - exact).norm() / exact.norm() < 0.04


def test_what_stands_beside_a_product() -> None:
    """In one kernel with it or not at all, and then the caller does it."""
    weights, kept, dtype = Fp8Weights(), finished(noise(64, 64)), torch.bfloat16
    norm, residual = InputNorm(noise(64, seed=3).to(dtype), 1e-5), noise(90, 64, seed=4).to(dtype)
    fused = set()

    def check(name: str, rows: int, fusion: Fusion, x: torch.Tensor, exact: torch.Tensor) -> None:
        got = weights.fused(x, kept, None, fusion)
        if got is not None:
            fused.add((name, rows))
            assert (got - exact).norm() <= 0.05 * exact.norm()

    w = weights.dequantize(kept).T
    for rows in (0, 1, 8, 90):
        x = noise(rows, 64, seed=2).to(dtype)
        states, total = residual[:rows].clone(), residual[:rows].clone()
        y = rms_norm(x, norm.weight_K, 1e-5).float() @ w
        check("norm", rows, Fusion(norm=norm), x, y)
        check("norm, gated", rows, Fusion(norm=norm, is_gated=True), x, silu_mul_reference(y))
        y = rms_norm(x + total, norm.weight_K, 1e-5).float() @ w
        check("sum", rows, Fusion(norm=norm, sum_TI=total), x, y)
        added = ("sum", rows) in fused
        assert torch.equal(total, x + residual[:rows] if added else residual[:rows])
        check("residual", rows, Fusion(residual_TO=states), x, x.float() @ w + residual[:rows])
        gate_up = noise(rows, 128, seed=2).to(dtype)
        y = silu_mul_reference(gate_up).float() @ w
        check("of gated", rows, Fusion(of_gated=True), gate_up, y)
        assert weights.gates_input(x, kept) == (rows > 1 and has_e4m3(DEVICE))
    known = {(name, 1) for name in ("norm", "norm, gated", "sum", "residual")}
    known |= {(name, rows) for name in ("norm", "sum", "of gated") for rows in (8, 90)}
    known.add(("residual", 8))
    assert fused == (known if has_e4m3(DEVICE) else set())


def test_of_gated() -> None:
    weights, kept = Fp8Weights(), finished(noise(48, 64))
    for rows in (0, 3, 40):
        gate_up = noise(rows, 128, seed=2).to(torch.bfloat16)
        exact = silu_mul_reference(gate_up).float() @ weights.dequantize(kept).T
        got = weights.linear_of_gated(gate_up, kept, None)
        assert (got - exact).norm() <= 0.04 * exact.norm()


# ---------------------------------------------------------------------- sizes


def packed(spec: ModelSpec) -> list[tuple[int, ...]]:
    """Matrices of the layers but routers, by their names."""
    shapes = expected_tensors(spec).items()
    rest = {spec.tensor_names[role] for role in ("embedding", "lm_head")}
    return [s for n, s in shapes if len(s) == 2 and n not in rest and "gate.weight" not in n]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_rows_are_counted(family: str) -> None:
    spec = read_spec(config(family))
    scales = sum(layer_scale_bytes(spec.hidden_size, layer, "fp8") for layer in spec.layers)
    assert scales == 4 * sum(shape[0] for shape in packed(spec))


@pytest.mark.parametrize("model", ["tiny", "demo:moe"])
def test_memory_is_as_announced_and_answers_are_near(model: str, tmp_path: Path) -> None:
    name = str(make_tiny_model(tmp_path)) if model == "tiny" else model
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 20, "dtype": "float32"}
    with LLM(name, weight_format="fp8", **options) as small, LLM(name, **options) as plain:
        weights = small.memory[0]
        assert weights.predicted == weights.measured
        assert weights.predicted < plain.memory[0].predicted
        ids = list(range(5, 60))
        near = (small.logits(ids) - plain.logits(ids)).norm() / plain.logits(ids).norm()
        assert 0 < near < 0.2


def test_what_is_said_at_the_start(tmp_path: Path) -> None:
    with LLM(str(make_tiny_model(tmp_path)), device="cpu", weight_format="fp8") as llm:
        said = [d for d in llm.resolved.decisions if d.field == "weight_format"]
    assert [d.because for d in said] == [
        "as asked, but a CPU multiplies in float32: smaller, not faster"
    ]


def test_the_line() -> None:
    line = WEIGHT_FORMATS["fp8"]
    assert (line.bits_per_weight(2), line.row_bytes) == (8, 4)
    assert open_weight_format("fp8").bits == line.bits == 8
