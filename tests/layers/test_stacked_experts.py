"""Stacked matrices of experts give what their layers give one by one, in each weight format."""

from __future__ import annotations

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.layers import experts
from ridgeline.layers.experts import ExpertLoad, Experts
from ridgeline.quantization import integers
from tests.layers.driving import build_decoder
from tests.layers.reference_models import tiny_config

PORTABLE = {"portable": "ridgeline.quantization.weight_layouts:PortableLayout"}


def layer(weight_format: str, *, is_loaded: bool = True) -> Experts:
    config = tiny_config("mixtral", hidden_size=128, intermediate_size=64)
    spec = read_spec(config, max_model_len=64)
    decoder = build_decoder(spec, max_model_len=64, weight_format=weight_format)
    if is_loaded:
        decoder.randomize(3)
    found = decoder.layers[1].feed_forward
    assert isinstance(found, Experts)
    return found


@pytest.mark.parametrize(
    "weight_format",
    ["plain", "fp8", "fp8-tensor", "fp8-block", "int4", "int4-g32", "int4-g64-asym"],
)
def test_all_at_once(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "LAYOUTS", PORTABLE)
    monkeypatch.setattr(experts, "STACKED_ON", frozenset())
    single = layer(weight_format)
    assert single.asks_host
    monkeypatch.setattr(experts, "STACKED_ON", {"cpu", "cuda"})
    stacked = layer(weight_format)
    assert not stacked.asks_host
    for linear in stacked.experts[1].linears:
        for tensor in linear.parameters.values():
            assert tensor.nbytes == 0 or tensor.untyped_storage().nbytes() == 4 * tensor.nbytes
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)) / 8
    x = x.to(next(iter(stacked.router.linear.parameters.values())).device)
    torch.testing.assert_close(stacked.of(x), single.of(x), rtol=1e-5, atol=1e-6)


def test_a_format_without_grouped_products_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "STACKED_ON", {"cpu", "cuda"})
    assert layer("int8-outliers").asks_host


def test_what_was_kept_is_adopted_into_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "STACKED_ON", {"cpu", "cuda"})
    first, second = layer("fp8"), layer("fp8", is_loaded=False)
    for one, other in zip(first.linears, second.linears, strict=True):
        other.adopt({name: tensor.clone() for name, tensor in one.kept().items()})
    x = torch.ones(2, 128)
    x = x.to(next(iter(first.router.linear.parameters.values())).device)
    torch.testing.assert_close(second.of(x), first.of(x), rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [frozenset(), frozenset({"cpu", "cuda"})], ids=["host", "device"])
def test_load_is_counted(kinds: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "STACKED_ON", kinds)
    one = layer("plain")
    where = next(iter(one.router.linear.parameters.values())).device
    load = ExpertLoad([one, one], where)
    assert load.busiest() == (0.0, 0.0)
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(2)).to(where)
    one.of(x)
    load.busiest()
    if where.type == "cuda":
        torch.cuda.synchronize()
    counts = torch.bincount(one.router.route(x).experts_TA.flatten(), minlength=4)
    unused, busiest = load.busiest()
    assert unused == 0.0
    assert busiest == pytest.approx(counts.max().item() * 4 / 100)
