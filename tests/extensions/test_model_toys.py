"""A family, a weight format, an attention backend and a KV format from outside the package each
need one file and one table line."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.architectures import FAMILIES, expected_tensors, read_spec
from ridgeline.architectures.counts import kv_bytes_per_token, num_parameters, weight_bytes
from ridgeline.attention import ATTENTION_BACKENDS
from ridgeline.errors import ConfigError
from ridgeline.formats import KV_FORMATS, WEIGHT_FORMATS
from ridgeline.kvcache import bytes_per_block
from ridgeline.quantization import open_weight_format
from tests.attention.cases import make_case, naive, random_shape
from tests.extensions import toy_kv_format, toy_weight_format
from tests.extensions.toy_attention import TextbookAttention
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.reference_models import ReferenceModel, tiny_config

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
TOY = {
    "model_type": "toy",
    "symbols": 97,
    "width": 32,
    "heads": 4,
    "depth": 4,
    "look_back": 3,
    "longest": 64,
}


@pytest.fixture(autouse=True)
def table_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user would add: one line in each table."""
    monkeypatch.setitem(FAMILIES, "toy", "tests.extensions.toy_architecture:read")
    monkeypatch.setitem(WEIGHT_FORMATS, "toy_int8", toy_weight_format.LINE)
    monkeypatch.setitem(KV_FORMATS, "toy_int8", toy_kv_format.LINE)
    monkeypatch.setitem(
        ATTENTION_BACKENDS, "toy", "tests.extensions.toy_attention:TextbookAttention"
    )


def toy_logits(
    *, backend: str = "auto", weight_format: str = "auto", kv_format: str = "auto"
) -> torch.Tensor:
    """A small Qwen3 in two steps, with one of its parts taken from outside."""
    model = ReferenceModel(tiny_config("qwen3"), seed=1)
    decoder = build_decoder(
        read_spec(model.config),
        max_model_len=64,
        backend=backend,
        weight_format=weight_format,
        kv_format=kv_format,
    )
    decoder.load(TensorDict(model.tensors))
    driver = Driver(decoder, kv_format=kv_format)
    steps = (driver.step({"a": TOKENS[:6], "b": TOKENS}), driver.step({"a": TOKENS[6:]}))
    return torch.cat([step["a"] for step in steps])


def test_family() -> None:
    spec = read_spec(TOY)
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: float(len(shape) == 1) + 0.2 * torch.randn(shape, generator=noise)
        for name, shape in expected_tensors(spec).items()
    }
    assert num_parameters(spec) == sum(tensor.numel() for tensor in tensors.values())
    decoder = build_decoder(spec, max_model_len=64)
    decoder.load(TensorDict(tensors))
    whole = Driver(decoder).step({"a": TOKENS[:4] + [0] * 20})["a"]
    driver = Driver(decoder)
    parts = [driver.step({"a": [token]})["a"] for token in TOKENS[:4] + [0] * 20]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="width is 30; it must be a multiple of heads"):
        read_spec(TOY | {"width": 30})


def test_attention_backend() -> None:
    for seed in range(20):
        case = make_case(random_shape(random.Random(seed)), seed)
        backend = TextbookAttention()
        plan = backend.plan(case.layout, 0, case.shape.spec.window)
        out = backend.attend(case.q_THD, case.layer_kv, plan, case.shape.spec).cpu()
        assert (out.double() - naive(case)).abs().max().item() < 1e-5, f"seed {seed}"
    torch.testing.assert_close(toy_logits(backend="toy"), toy_logits(), atol=1e-4, rtol=0)


def test_weight_format() -> None:
    spec = read_spec(tiny_config("qwen3"))
    assert weight_bytes(spec, 4, "toy_int8") < 0.5 * weight_bytes(spec, 4)
    weights = open_weight_format("toy_int8")
    parameters = weights.parameters(24, 32, torch.float32, torch.device("cpu"))
    parameters["weight"].normal_(generator=torch.Generator().manual_seed(0))
    kept = weights.finish(parameters)
    assert sum(t.numel() * t.element_size() for t in kept.values()) == 24 * 32 * 10 / 8
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(weights.linear(x, kept, None), x @ weights.dequantize(kept).T)
    near = (toy_logits(weight_format="toy_int8") - toy_logits()).norm() / toy_logits().norm()
    assert 0 < near < 0.05


def test_kv_format() -> None:
    spec = read_spec(tiny_config("qwen3"))
    assert kv_bytes_per_token(spec, 4, "toy_int8") == 3 * 2 * 2 * (16 + 4)
    assert bytes_per_block(spec, 4, 4, kv_format="toy_int8") == 4 * 3 * 2 * 2 * (16 + 4)
    near = (toy_logits(kv_format="toy_int8") - toy_logits()).norm() / toy_logits().norm()
    assert 0 < near < 0.05
