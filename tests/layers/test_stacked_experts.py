"""Stacked matrices of experts, and the native kernels of a CPU, give what their layers give one by
one, in each weight format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.cost.captured import can_capture
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.cpu import native
from ridgeline.layers import experts
from ridgeline.layers.experts import ExpertLoad, Experts
from ridgeline.quantization import integers
from tests.layers.driving import Driver, build_decoder, load_decoder
from tests.layers.reference_models import VOCAB, ReferenceModel, tiny_config

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
# Whose experts the kernels know: with a shared one and its gate, groups of experts and a bias of
# the choice, biases and a clamped gate.
FAMILIES = {
    "mixtral": tiny_config("mixtral"),
    "qwen2_moe": tiny_config("qwen2_moe", moe_intermediate_size=32, num_experts=15),
    "deepseek_v3": tiny_config("deepseek_v3", moe_intermediate_size=32),
    "gpt_oss": tiny_config("gpt_oss"),
}
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


def native_layer(config: dict[str, Any], dtype: torch.dtype, weight_format: str) -> Experts:
    spec = read_spec(config, max_model_len=64)
    decoder = build_decoder(
        spec, max_model_len=64, dtype=dtype, weight_format=weight_format, device="cpu"
    )
    decoder.randomize(3)
    found = decoder.layers[-1].feed_forward
    assert isinstance(found, Experts)
    return found


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "weight_format"),
    [(torch.bfloat16, "plain"), (torch.float32, "int8"), (torch.float32, "int4-g32-asym")],
    ids=["plain", "int8", "int4"],
)
def test_one_native_call(family: str, dtype: torch.dtype, weight_format: str) -> None:
    one = native_layer(FAMILIES[family], dtype, weight_format)
    assert not one.asks_host
    x_TE = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = one.of(x_TE)
    one.packed = None
    assert one.asks_host
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    want = one.of(x_TE)
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * want.abs().max().item())


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_native_calls_against_transformers(family: str) -> None:
    """The same bfloat16 weights, there in float32. States are rounded here, so that some tokens go
    to other experts; the median is of those that do not."""
    reference = ReferenceModel(FAMILIES[family])
    for tensor in reference.model.state_dict().values():
        tensor.copy_(tensor.to(torch.bfloat16))
    decoder = load_decoder(
        reference.config, reference.tensors, max_model_len=64, dtype=torch.bfloat16
    )
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    layers = [x.feed_forward for x in decoder.layers if isinstance(x.feed_forward, Experts)]
    load = ExpertLoad(layers, decoder.device)
    got = Driver(decoder).step({"a": ids})["a"]
    want = reference.logits(ids)
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).median() < 0.04
    load.busiest()
    assert all(busiest > 1 for busiest in load.busiest())


@needs_library
@pytest.mark.parametrize(
    ("change", "dtype", "weight_format"),
    [
        ({"hidden_act": "gelu"}, torch.bfloat16, "plain"),
        ({"intermediate_size": 40}, torch.bfloat16, "plain"),
        ({}, torch.float32, "plain"),
        ({}, torch.float32, "int8-outliers"),
    ],
    ids=["activation", "width", "dtype", "format"],
)
def test_experts_without_native_products_ask(
    change: dict[str, Any], dtype: torch.dtype, weight_format: str
) -> None:
    config = tiny_config("mixtral", **change)
    one = native_layer(config, dtype, weight_format)
    assert one.asks_host
    spec = read_spec(config, max_model_len=64)
    line = WEIGHT_FORMATS[weight_format]
    assert not can_capture(spec, "cpu", line, str(dtype).removeprefix("torch."))
    assert one.of(torch.ones(3, 64, dtype=dtype)).isfinite().all()
