"""LLM.int8(): what is large in x is multiplied in its own dtype, and no request sees another's."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.cpu import native
from ridgeline.quantization import Fusion, open_weight_format
from ridgeline.quantization.int8_outliers import THRESHOLD, split_outliers

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def x_with_outliers(rows: int) -> torch.Tensor:
    """Two columns a hundred times as large as the rest, in every row but the second."""
    x = noise(rows, 256, seed=1).clamp(-5, 5)
    x[:, [7, 130]] *= 100
    x[:, [7, 130]] += torch.tensor([60.0, -90.0]) * x[:, [7, 130]].sign()
    x[1:2, [7, 130]] = 0.5
    return x


def test_what_is_split() -> None:
    x = x_with_outliers(4)
    split = split_outliers(x)
    assert split is not None
    assert split.columns_C.tolist() == [7, 130]
    assert split.rest_TI.abs().max() <= THRESHOLD
    whole = split.rest_TI.clone()
    whole[:, split.columns_C] += split.loud_TC
    assert torch.equal(whole, x)
    assert split.rest_TI[1, 7] == 0.5
    assert split_outliers(x[1:2]) is None
    assert split_outliers(x[:0]) is None
    broken = torch.full((1, 4), torch.nan)
    assert split_outliers(broken) is None  # stays where products see it


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_outliers_do_not_spoil_the_rest(rows: int, dtype: torch.dtype) -> None:
    """One scale for a row leaves one or two bits of its other numbers."""
    weight = noise(64, 256, seed=2)
    weight[:, [7, 130]] = weight[:, [7, 130]].abs().clamp_max(1e-3)  # so that the rest is seen
    x = x_with_outliers(rows).to(dtype)
    found = {}
    for name in ("int8", "int8-outliers"):
        weights = open_weight_format(name)
        kept = weights.finish({"weight": weight})
        exact = x.double() @ weights.dequantize(kept).double().T + 1
        got = weights.linear(x, kept, torch.ones(64, dtype=dtype))
        assert got.dtype == dtype
        found[name] = float((got.double() - exact).norm() / exact.norm())
    assert found["int8-outliers"] < 0.01
    if rows > 1:
        assert found["int8"] > 5 * found["int8-outliers"]


@needs_library
def test_rows_without_outliers_are_as_in_int8() -> None:
    weight, x = noise(64, 256, seed=3), noise(5, 256, seed=4).clamp(-5, 5)
    plain, careful = open_weight_format("int8"), open_weight_format("int8-outliers")
    kept = {name: f.finish({"weight": weight}) for name, f in (("p", plain), ("c", careful))}
    wanted = plain.linear(x, kept["p"], None)
    assert torch.equal(careful.linear(x, kept["c"], None), wanted)
    gated = careful.fused(x, kept["c"], None, Fusion(is_gated=True))
    assert gated is not None
    assert careful.fused(x_with_outliers(5), kept["c"], None, Fusion(is_gated=True)) is None
    company = torch.cat((x, x_with_outliers(3)))
    both = careful.linear(company, kept["c"], None)
    torch.testing.assert_close(both[:5], wanted, rtol=1e-6, atol=1e-6)


@needs_library
def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    weights = open_weight_format("int8-outliers")
    kept = weights.finish({"weight": noise(32, 64, seed=5)})
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = noise(3, 64, seed=6)
        good = weights.linear(x, kept, None)
        x[1, 9] = bad
        y = weights.linear(x, kept, None)
        assert not torch.isfinite(y[1]).any(), bad
        torch.testing.assert_close(y[0::2], good[0::2], rtol=1e-6, atol=1e-6)


def test_without_panels_x_is_not_rounded_at_all() -> None:
    weights = open_weight_format("int8-outliers")
    kept = weights.finish({"weight": noise(17, 64, seed=7)})
    assert "codes" in kept
    x = noise(3, 64, seed=8) * 50
    exact = x @ weights.dequantize(kept).T
    torch.testing.assert_close(weights.linear(x, kept, None), exact)
