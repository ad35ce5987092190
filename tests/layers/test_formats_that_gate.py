"""A feed-forward adds the same to the states whatever its weight format takes into one kernel: the
sum before the norm, the norm, the gate in front of the second product, the residual, or nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ridgeline.architectures.spec import DenseSpec
from ridgeline.distributed.placement import Placement
from ridgeline.kernels.quantize_rows import has_e4m3
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.layers.feed_forward import FeedForward
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear, Part
from ridgeline.quantization import Fusion, Parameters, WeightFormat
from ridgeline.quantization.fp8 import Fp8Weights
from ridgeline.quantization.plain import PlainWeights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, INNER, EPS = 64, 96, 1e-5


class Gating(PlainWeights):
    """Takes what it is told to take, one thing after the other."""

    def __init__(self, takes: str) -> None:
        self.takes = takes
        self.seen: list[str] = []

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        residual = fusion.residual_TO
        if fusion.is_gated or (residual is not None and "residual" not in self.takes):
            return None
        if fusion.sum_TI is not None:
            if "sum" not in self.takes:
                return None
            self.seen.append("sum")
            x_TI = fusion.sum_TI.add_(x_TI)
        x_TI = silu_mul(x_TI) if fusion.of_gated else x_TI
        if fusion.norm is not None:
            x_TI = rms_norm(x_TI, fusion.norm.weight_K, fusion.norm.eps)
        y_TO = self.linear(x_TI, parameters, bias_O)
        self.seen += [] if residual is None else ["residual"]
        return y_TO if residual is None else residual.add_(y_TO)

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        return "gate" in self.takes and x_TI.shape[0] > 1

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        self.seen.append("gate")
        return self.linear(silu_mul(x_TG), parameters, bias_O)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def make(
    kind: WeightFormat, dtype: torch.dtype, width: int = WIDTH, inner: int = INNER
) -> tuple[FeedForward, RMSNorm]:
    def linear(parts: list[Part], inputs: int, **more: object) -> Linear:
        return Linear(
            parts,
            inputs,
            weight_format=kind,
            dtype=dtype,
            device=DEVICE,
            placement=Placement(),
            **more,  # type: ignore[arg-type]
        )

    layer = FeedForward(DenseSpec(inner), width, str, linear, Placement())
    for seed, some in enumerate(layer.linears):
        shape = some.parameters["weight"].shape
        some.parameters["weight"].copy_(noise(*shape, seed=seed) / shape[1] ** 0.5)
        some.finish()
    norm = RMSNorm("norm", width, EPS, dtype, DEVICE)
    norm.weight_E.copy_(1 + 0.1 * noise(width, seed=5))
    return layer, norm


def wanted(layer: FeedForward, norm: RMSNorm, states: torch.Tensor) -> torch.Tensor:
    """In float32, of the weights as they are kept."""
    w_up, w_down = (
        some.format.dequantize(some.parameters).float() for some in (layer.gate_up, layer.down)
    )
    wide = states.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    gate, up = (wide * factor * norm.weight_E.float() @ w_up.T).chunk(2, -1)
    return wide + functional.silu(gate) * up @ w_down.T


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("takes", ["", "gate", "sum", "sum gate", "sum gate residual"])
def test_what_is_taken_makes_no_difference(takes: str, pending: bool, rows: int) -> None:
    kind = Gating(takes)
    layer, norm = make(kind, torch.float32)
    states, delta = noise(rows, WIDTH, seed=7), noise(rows, WIDTH, seed=8)
    exact = wanted(layer, norm, states + delta if pending else states)
    hidden = Hidden(states)
    hidden.partial_TE = delta if pending else None
    layer(hidden, norm)
    assert (hidden.partial_TE is None) == ("residual" in takes)
    assert ("residual" in kind.seen) == ("residual" in takes)
    # A gated product in one kernel is not what this format has; then the sum is not in it either.
    by_halves = "gate" in takes and rows > 1
    assert ("sum" in kind.seen) == ("sum" in takes and pending and by_halves)
    assert ("gate" in kind.seen) == (by_halves and "residual" not in takes)
    torch.testing.assert_close(hidden.whole(), exact, rtol=1e-4, atol=1e-4)
    assert hidden.whole() is states


@pytest.mark.gpu
@pytest.mark.skipif(not has_e4m3(DEVICE), reason="needs a GPU with e4m3")
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 64, 128, 200, 256, 300])
@pytest.mark.parametrize("pending", [False, True])
def test_e4m3_on_a_gpu(pending: bool, rows: int) -> None:
    """One row is not rounded; of more, both products' inputs are, by 2.6 % each in the mean."""
    dtype = torch.bfloat16
    layer, norm = make(Fp8Weights(), dtype, 4096, 1536)
    states, delta = noise(rows, 4096, seed=7, dtype=dtype), noise(rows, 4096, seed=8, dtype=dtype)
    before = (states + delta if pending else states).float()
    exact = wanted(layer, norm, before)
    hidden = Hidden(states)
    hidden.partial_TE = delta if pending else None
    layer(hidden, norm)
    added, bound = hidden.whole().float() - before, 0.02 if rows == 1 else 0.08
    assert (added - (exact - before)).norm() <= bound * (exact - before).norm()
