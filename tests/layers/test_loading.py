"""Loading: every rank reads its share, random models are reproducible, bad files are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import num_parameters
from ridgeline.errors import ConfigError
from ridgeline.layers.decoder import Decoder
from tests.conftest import TEST_DEVICE
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.reference_models import ReferenceModel, tiny_config

TOKENS = [3, 14, 15, 92, 65, 35]


def decoder_of(config: dict[str, Any], **options: Any) -> Decoder:
    return build_decoder(read_spec(config), max_model_len=64, **options)


def logits(decoder: Decoder) -> torch.Tensor:
    return Driver(decoder).step({"a": TOKENS})["a"]


def test_progress_counts_every_byte_once() -> None:
    model = ReferenceModel(tiny_config("mixtral"))
    seen: list[int] = []
    decoder_of(model.config).load(TensorDict(model.tensors), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 4 * num_parameters(read_spec(model.config))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_dtype_becomes_the_serving_dtype(stored: torch.dtype) -> None:
    model = ReferenceModel(tiny_config("llama"))
    rounded = {name: tensor.to(stored) for name, tensor in model.tensors.items()}
    low, high = decoder_of(model.config), decoder_of(model.config)
    low.load(TensorDict(rounded))
    high.load(TensorDict({name: tensor.float() for name, tensor in rounded.items()}))
    assert torch.equal(logits(low), logits(high))


@pytest.mark.parametrize("shape", [(80, 63), (160, 64), (40, 64), (64, 80), (80,)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = ReferenceModel(tiny_config("llama"))
    wrong = model.tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(shape)}
    with pytest.raises(ConfigError, match=r"up_proj.weight has shape \(.*where \(80, 64\) is"):
        decoder_of(model.config).load(TensorDict(wrong))


def test_a_tied_model_with_another_output_matrix_is_refused() -> None:
    model = ReferenceModel(tiny_config("llama", tie_word_embeddings=True))
    embedding = model.tensors["model.embed_tokens.weight"]
    same = model.tensors | {"lm_head.weight": embedding.clone()}
    decoder_of(model.config).load(TensorDict(same))
    other = model.tensors | {"lm_head.weight": embedding + 1}
    with pytest.raises(ConfigError, match="tie_word_embeddings is true but lm_head"):
        decoder_of(model.config).load(TensorDict(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2", "qwen3"])
def test_random_models(family: str, dtype: torch.dtype) -> None:
    """The same seed gives the same model; matrices have std 0.02, norms are 1, biases 0."""
    config = tiny_config(family)
    one, two, other = (decoder_of(config, dtype=dtype) for _ in range(3))
    pieces = list(one.pieces())  # packing on a CPU moves numbers within their matrix
    one.randomize(7)
    two.randomize(7)
    other.randomize(8)
    assert torch.equal(logits(one), logits(two))
    assert not torch.equal(logits(one), logits(other))
    for piece in pieces:
        values = piece.target.float()
        if "norm" in piece.name:
            assert (values == 1).all()
        elif piece.name.endswith("bias"):
            assert (values == 0).all()
        elif values.numel() > 1000:
            assert values.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(values.mean().item()) < 0.002
    matrices = [p.target for p in pieces if p.name.endswith("q_proj.weight")]
    assert not torch.equal(matrices[0], matrices[1])


def test_hidden_states_of_several_steps_do_not_alias() -> None:
    """A step in flight must not be overwritten by the next one."""
    decoder = decoder_of(tiny_config("llama"))
    decoder.randomize(0)
    driver = Driver(decoder)
    first = decoder.forward(driver.batch({"a": TOKENS}), driver.kv)
    kept = first.clone()
    decoder.forward(driver.batch({"a": [5], "b": TOKENS}), driver.kv)
    assert torch.equal(first, kept)
    assert first.device.type == torch.device(TEST_DEVICE).type


def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    for family in ("llama", "mixtral", "qwen2", "qwen3"):
        model = ReferenceModel(tiny_config(family, num_hidden_layers=2), seed=3)
        exact = model.logits(TOKENS).double()
        rounded = {name: t.to(torch.bfloat16) for name, t in model.tensors.items()}
        decoder = decoder_of(model.config, dtype=torch.bfloat16)
        decoder.load(TensorDict(rounded))
        model.model.to(torch.bfloat16)
        theirs = (model.logits(TOKENS).double() - exact).norm()
        ours = (logits(decoder).double() - exact).norm()
        assert ours <= 2 * theirs, family
